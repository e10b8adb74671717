"""The use of caches by a run: proof, trace and bench."""

#: The file of :mod:`cachectl.watching.ledger` below the user's state folder; to load that module takes milliseconds.
LEDGER = "ledger/ledger.json"
