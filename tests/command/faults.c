/* Faults of a file system for tests. Preloaded into a program, this lets calls fail on files whose path contains a text:
 *
 *   FAULT_CALL    flock, read, write, create, or disk: write and fdatasync
 *   FAULT_ERRNO   the number of the error. A negative one is a signal: the first such call sends it to its own process, and
 *                 goes on if the process does
 *   FAULT_PATH    the text
 *   FAULT_RANK    the rank that meets the fault (absent: all)
 *   FAULT_HIDDEN  a text: the same rank cannot read files whose path contains it (absent: none)
 *   FAULT_SKIP    so many of the calls succeed first (absent: none)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int meets(const char *call, const char *path) {
    static atomic_int signalled, met;
    const char *wanted = getenv("FAULT_CALL"), *text = getenv("FAULT_PATH"), *rank = getenv("FAULT_RANK");
    const char *own = getenv("OMPI_COMM_WORLD_RANK");
    if (!wanted || !text || !path || strcmp(wanted, call) || !strstr(path, text)) return 0;
    if (rank && (!own || strcmp(rank, own))) return 0;
    const char *skip = getenv("FAULT_SKIP");
    if (atomic_fetch_add(&met, 1) < (skip ? atoi(skip) : 0)) return 0;
    int number = atoi(getenv("FAULT_ERRNO"));
    if (number < 0) {
        if (!atomic_exchange(&signalled, 1)) kill(getpid(), -number);
        return 0;
    }
    errno = number;
    return 1;
}

static int meets_open(const char *call, int descriptor) {
    if (!getenv("FAULT_CALL") || strcmp(getenv("FAULT_CALL"), call)) return 0;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return meets(call, path);
}

static int hidden(int descriptor) {
    const char *text = getenv("FAULT_HIDDEN"), *rank = getenv("FAULT_RANK"), *own = getenv("OMPI_COMM_WORLD_RANK");
    if (!text || (rank && (!own || strcmp(rank, own)))) return 0;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, text)) return 0;
    errno = EIO;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int flock(int descriptor, int operation) {
    if (meets_open("flock", descriptor)) return -1;
    return REAL(flock)(descriptor, operation);
}

ssize_t read(int descriptor, void *bytes, size_t count) {
    if (meets_open("read", descriptor) || hidden(descriptor)) return -1;
    return REAL(read)(descriptor, bytes, count);
}

ssize_t write(int descriptor, const void *bytes, size_t count) {
    if (meets_open("write", descriptor) || meets_open("disk", descriptor)) return -1;
    return REAL(write)(descriptor, bytes, count);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    if (meets_open("write", descriptor)) return -1;
    return REAL(writev)(descriptor, parts, count);
}

int fdatasync(int descriptor) {
    if (meets_open("disk", descriptor)) return -1;
    return REAL(fdatasync)(descriptor);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if ((flags & O_ACCMODE) != O_RDONLY && meets("create", path)) return -1;
    return REAL(open64)(path, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
    if (meets("create", path)) return -1;
    return REAL(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    if (meets("create", to)) return -1;
    return REAL(rename)(from, to);
}
