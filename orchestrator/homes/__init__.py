"""Verbs in the homes of other users: the superuser starts, for each, a child that has become that user."""

from cachectl.homes.accounts import Account, account_of_home, accounts_of, every_account
from cachectl.homes.gathering import Homes, InHome, doctor, gather, ls, prune, purge, report, verify

__all__ = [
    "Account",
    "Homes",
    "InHome",
    "account_of_home",
    "accounts_of",
    "doctor",
    "every_account",
    "gather",
    "ls",
    "prune",
    "purge",
    "report",
    "verify",
]
