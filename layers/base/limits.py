"""Limits on sizes, in bytes unless they say otherwise."""

#: One entry, or one file that is read whole. Entries are held in memory. The largest known ones, programs of the CUDA
#: driver, have some 100 MiB; the whole CUDA cache has 4 GiB by default.
LARGEST_ENTRY = 1 << 30
#: The file of one entry that ``get`` writes and ``put`` reads.
LARGEST_ARTIFACT = LARGEST_ENTRY + (1 << 20)
#: A text database of MIOpen. Its largest shipped ones have some 50 MiB. Changing one holds it several times in memory.
LARGEST_RECORDS = 256 << 20
#: An index that lists the entries of a store. One of 64 MiB lists a million entries of Mesa's.
LARGEST_INDEX = 64 << 20
#: One key. The longest are those of MIOpen, which contain compiler arguments.
LONGEST_KEY = 1 << 14
#: How many details and versions an entry may have.
MOST_DETAILS = 64
#: A bundle that is copied into the folder of temporary files.
LARGEST_BUNDLE = 32 << 30
#: What such a copy leaves free on that file system, as other programs write there too.
SPARED_ROOM = 256 << 20
#: A signature of OpenSSH has less than 1 KiB.
LARGEST_SIGNATURE = 1 << 20
