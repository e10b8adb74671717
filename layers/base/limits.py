"""Limits on sizes, in bytes unless stated otherwise."""

#: One entry, or one file that is read completely. Entries are held in memory. The largest known ones, programs of the
#: CUDA driver, have some 100 MiB; the whole CUDA cache has 4 GiB by default.
LARGEST_ENTRY = 1 << 30
#: The file of one entry that ``get`` writes and ``put`` reads.
LARGEST_ARTIFACT = LARGEST_ENTRY + (1 << 20)
#: A text database of MIOpen. The largest ones shipped have some 50 MiB. A change holds several copies in memory.
LARGEST_RECORDS = 256 << 20
#: An index that lists the entries of a shared store. 64 MiB list a million entries of Mesa's.
LARGEST_INDEX = 64 << 20
#: One key. The longest are those of MIOpen, which contain compiler arguments.
LONGEST_KEY = 1 << 14
#: How many details and versions an entry may have.
MOST_DETAILS = 64
#: A bundle that is copied into the folder of temporary files.
LARGEST_BUNDLE = 32 << 30
#: What such a copy leaves free on that file system, because other programs write there too.
SPARED_ROOM = 256 << 20
#: A signature made by OpenSSH has less than 1 KiB.
LARGEST_SIGNATURE = 1 << 20
