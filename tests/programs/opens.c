/* Logs, to the file that OPENS_LOG names, each opening of a file whose path contains OPENS_IN: a line of the process,
   the flags, the error and the path. Loaded with LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void note(const char *path, int flags, int failed) {
    const char *in = getenv("OPENS_IN"), *log = getenv("OPENS_LOG");
    int error = errno;
    if (in && log && path && strstr(path, in)) {
        char line[4500];
        int length = snprintf(line, sizeof line, "%d %d %d %s\n", getpid(), flags, failed ? error : 0, path);
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file >= 0) {
            if (write(file, line, length) < 0) { }
            syscall(SYS_close, file);
        }
    }
    errno = error;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        static int (*real)(const char *, int, ...); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        int file = real(path, flags, mode); \
        note(path, flags, file < 0); \
        return file; \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        static int (*real)(int, const char *, int, ...); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        int file = real(folder, path, flags, mode); \
        note(path, flags, file < 0); \
        return file; \
    }
#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        static FILE *(*real)(const char *, const char *); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        FILE *file = real(path, mode); \
        int plus = strchr(mode, '+') != NULL; \
        note(path, mode[0] == 'r' ? (plus ? O_RDWR : O_RDONLY) : (plus ? O_RDWR : O_WRONLY) | O_CREAT, !file); \
        return file; \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)
