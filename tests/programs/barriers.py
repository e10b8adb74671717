"""A rank that looks a key up right after each of eight barriers, as all ranks do at the same moment."""

from contextlib import suppress

from mpi4py import MPI
from pytools.persistent_dict import NoSuchEntryError, WriteOncePersistentDict

dictionaries = [WriteOncePersistentDict(f"barrier-{number}") for number in range(8)]
for dictionary in dictionaries:
    MPI.COMM_WORLD.Barrier()
    with suppress(NoSuchEntryError):
        dictionary.fetch(MPI.COMM_WORLD.rank)
