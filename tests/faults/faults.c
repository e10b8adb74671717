/* Fails, or kills the process at, the Nth call on a path below a folder. Loaded by LD_PRELOAD; armed by injector.py.
 *
 * The state is shared memory, so that helpers of the process count too, and the parent can read it after a kill.
 * Paths are resolved by raw system calls: the functions of libc are the ones replaced here. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READS = 1, WRITES = 2, LOCKS = 4 };
enum { KILL = -1 };

struct state {
    char root[4096];
    int kinds, error, sticky;
    long nth, seen;
    char where[4352];
};
static struct state *state;

__attribute__((constructor)) static void begin(void) {
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* Count calls of some kinds below a root; at the nth return an error (0: count only; -1: SIGKILL). */
void fault_arm(const char *root, int kinds, long nth, int error, int sticky) {
    state->kinds = 0;
    snprintf(state->root, sizeof state->root, "%s", root);
    state->seen = 0, state->nth = nth, state->error = error, state->sticky = sticky, state->where[0] = 0;
    state->kinds = kinds;
}
void fault_disarm(void) { state->kinds = 0; }
long fault_seen(void) { return state->seen; }
const char *fault_where(void) { return state->where; }

static int below(const char *path) {
    size_t length = strlen(state->root);
    return !strncmp(path, state->root, length) && (path[length] == 0 || path[length] == '/');
}

static void resolve(int folder, const char *path, char *full, size_t size) {
    full[0] = 0;
    if (path && path[0] == '/') {
        snprintf(full, size, "%s", path);
        return;
    }
    char link[64];
    long length;
    if (folder == AT_FDCWD) {
        length = syscall(SYS_getcwd, full, size) - 1;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = syscall(SYS_readlinkat, AT_FDCWD, link, full, size - 1);
    }
    if (length < 0) {
        full[0] = 0;
        return;
    }
    full[length] = 0;
    if (path && path[0]) snprintf(full + length, size - (size_t)length, "/%s", path);
}

/* Return whether this call is to fail; errno is set then. */
static int fails(int kind, const char *call, int folder, const char *path) {
    char full[4096];
    int before = errno;
    if (!state || !(state->kinds & kind)) return 0;
    resolve(folder, path, full, sizeof full);
    if (!below(full)) {
        errno = before;
        return 0;
    }
    long number = __atomic_add_fetch(&state->seen, 1, __ATOMIC_SEQ_CST);
    errno = before;
    if (!state->error || !(number == state->nth || (state->sticky && number > state->nth))) return 0;
    if (number == state->nth) snprintf(state->where, sizeof state->where, "%s %s", call, full);
    if (state->error == KILL) syscall(SYS_kill, getpid(), SIGKILL);
    errno = state->error;
    return 1;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

#define ON_PATH(kind, bad, type, name, folder, path, params, args, ...) \
    type name params { \
        REAL(type, name, __VA_ARGS__); \
        return fails(kind, #name, folder, path) ? bad : real args; \
    }

static int opens(int flags) { return (flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC)) ? WRITES : READS; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return fails(opens(flags), #name, AT_FDCWD, path) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return fails(opens(flags), #name, folder, path) ? -1 : real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FCNTL(name) \
    int name(int file, int command, ...) { \
        REAL(int, name, int, int, ...); \
        va_list rest; \
        va_start(rest, command); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW; \
        return locks && fails(LOCKS, #name, file, NULL) ? -1 : real(file, command, argument); \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
ON_PATH(LOCKS, -1, int, flock, file, NULL, (int file, int operation), (file, operation), int, int)

/* Reads. */
ON_PATH(READS, -1, ssize_t, read, file, NULL, (int file, void *data, size_t size), (file, data, size), int, void *, size_t)
ON_PATH(READS, -1, ssize_t, pread, file, NULL, (int file, void *data, size_t size, off_t at), (file, data, size, at), int, void *, size_t, off_t)
ON_PATH(READS, -1, ssize_t, pread64, file, NULL, (int file, void *data, size_t size, off64_t at), (file, data, size, at), int, void *, size_t, off64_t)
ON_PATH(READS, NULL, DIR *, opendir, AT_FDCWD, path, (const char *path), (path), const char *)
ON_PATH(READS, NULL, DIR *, fdopendir, file, NULL, (int file), (file), int)
ON_PATH(READS, NULL, struct dirent64 *, readdir64, dirfd(folder), NULL, (DIR *folder), (folder), DIR *)
ON_PATH(READS, -1, int, stat, AT_FDCWD, path, (const char *path, struct stat *to), (path, to), const char *, struct stat *)
ON_PATH(READS, -1, int, stat64, AT_FDCWD, path, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
ON_PATH(READS, -1, int, lstat, AT_FDCWD, path, (const char *path, struct stat *to), (path, to), const char *, struct stat *)
ON_PATH(READS, -1, int, lstat64, AT_FDCWD, path, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
ON_PATH(READS, -1, int, fstat, file, NULL, (int file, struct stat *to), (file, to), int, struct stat *)
ON_PATH(READS, -1, int, fstat64, file, NULL, (int file, struct stat64 *to), (file, to), int, struct stat64 *)
ON_PATH(READS, -1, int, fstatat, folder, path, (int folder, const char *path, struct stat *to, int flags), (folder, path, to, flags), int, const char *, struct stat *, int)
ON_PATH(READS, -1, int, fstatat64, folder, path, (int folder, const char *path, struct stat64 *to, int flags), (folder, path, to, flags), int, const char *, struct stat64 *, int)
ON_PATH(READS, -1, ssize_t, readlink, AT_FDCWD, path, (const char *path, char *to, size_t size), (path, to, size), const char *, char *, size_t)
ON_PATH(READS, -1, ssize_t, readlinkat, folder, path, (int folder, const char *path, char *to, size_t size), (folder, path, to, size), int, const char *, char *, size_t)

/* Writes. */
ON_PATH(WRITES, -1, ssize_t, write, file, NULL, (int file, const void *data, size_t size), (file, data, size), int, const void *, size_t)
ON_PATH(WRITES, -1, ssize_t, writev, file, NULL, (int file, const struct iovec *data, int parts), (file, data, parts), int, const struct iovec *, int)
ON_PATH(WRITES, -1, ssize_t, pwrite, file, NULL, (int file, const void *data, size_t size, off_t at), (file, data, size, at), int, const void *, size_t, off_t)
ON_PATH(WRITES, -1, ssize_t, pwrite64, file, NULL, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), int, const void *, size_t, off64_t)
ON_PATH(WRITES, -1, ssize_t, copy_file_range, to, NULL, (int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags), (from, from_at, to, to_at, size, flags), int, off64_t *, int, off64_t *, size_t, unsigned)
ON_PATH(WRITES, -1, ssize_t, sendfile, to, NULL, (int to, int from, off_t *at, size_t size), (to, from, at, size), int, int, off_t *, size_t)
ON_PATH(WRITES, -1, ssize_t, sendfile64, to, NULL, (int to, int from, off64_t *at, size_t size), (to, from, at, size), int, int, off64_t *, size_t)
ON_PATH(WRITES, -1, int, ftruncate, file, NULL, (int file, off_t size), (file, size), int, off_t)
ON_PATH(WRITES, -1, int, ftruncate64, file, NULL, (int file, off64_t size), (file, size), int, off64_t)
ON_PATH(WRITES, -1, int, fsync, file, NULL, (int file), (file), int)
ON_PATH(WRITES, -1, int, fdatasync, file, NULL, (int file), (file), int)
ON_PATH(WRITES, -1, int, syncfs, file, NULL, (int file), (file), int)
ON_PATH(WRITES, -1, int, rename, AT_FDCWD, from, (const char *from, const char *to), (from, to), const char *, const char *)
ON_PATH(WRITES, -1, int, renameat, folder, from, (int folder, const char *from, int other, const char *to), (folder, from, other, to), int, const char *, int, const char *)
ON_PATH(WRITES, -1, int, renameat2, folder, from, (int folder, const char *from, int other, const char *to, unsigned flags), (folder, from, other, to, flags), int, const char *, int, const char *, unsigned)
ON_PATH(WRITES, -1, int, link, AT_FDCWD, to, (const char *from, const char *to), (from, to), const char *, const char *)
ON_PATH(WRITES, -1, int, linkat, other, to, (int folder, const char *from, int other, const char *to, int flags), (folder, from, other, to, flags), int, const char *, int, const char *, int)
ON_PATH(WRITES, -1, int, symlink, AT_FDCWD, to, (const char *from, const char *to), (from, to), const char *, const char *)
ON_PATH(WRITES, -1, int, symlinkat, folder, to, (const char *from, int folder, const char *to), (from, folder, to), const char *, int, const char *)
ON_PATH(WRITES, -1, int, unlink, AT_FDCWD, path, (const char *path), (path), const char *)
ON_PATH(WRITES, -1, int, unlinkat, folder, path, (int folder, const char *path, int flags), (folder, path, flags), int, const char *, int)
ON_PATH(WRITES, -1, int, rmdir, AT_FDCWD, path, (const char *path), (path), const char *)
ON_PATH(WRITES, -1, int, mkdir, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
ON_PATH(WRITES, -1, int, mkdirat, folder, path, (int folder, const char *path, mode_t mode), (folder, path, mode), int, const char *, mode_t)
ON_PATH(WRITES, -1, int, chmod, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
ON_PATH(WRITES, -1, int, fchmod, file, NULL, (int file, mode_t mode), (file, mode), int, mode_t)
ON_PATH(WRITES, -1, int, fchmodat, folder, path, (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags), int, const char *, mode_t, int)
ON_PATH(WRITES, -1, int, utimensat, folder, path, (int folder, const char *path, const struct timespec times[2], int flags), (folder, path, times, flags), int, const char *, const struct timespec *, int)
ON_PATH(WRITES, -1, int, futimens, file, NULL, (int file, const struct timespec times[2]), (file, times), int, const struct timespec *)
