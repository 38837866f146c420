#!/usr/bin/env bash
# Puts longstraw under PREFIX so that it runs from any shell and under any launcher, without LD_LIBRARY_PATH.
#
#   scripts/install.sh PREFIX       PREFIX/bin/longstraw, PREFIX/lib/longstraw/*.so*
#
# The installed binary looks for its libraries beside itself (../lib/longstraw), so the clone may go away afterwards.
# With LIBTORCH=FOLDER nothing is copied: the binary uses that folder, which must then stay.
# docs/decisions/0004-install.md says why.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$#" != 1 ] || [ -z "$1" ]; then
    echo "usage: scripts/install.sh PREFIX" >&2
    exit 2
fi
case $1 in
/*) prefix=$1 ;;
*) prefix=$PWD/$1 ;;
esac

if ! mkdir -p "$prefix/bin" "$prefix/lib" 2>/dev/null || [ ! -w "$prefix/bin" ] || [ ! -w "$prefix/lib" ]; then
    echo "install: $prefix cannot be written to; choose another one:  make install PREFIX=\$HOME/.local" >&2
    exit 1
fi

# Only the last link is made again, with one more search path.
# shellcheck disable=SC2016 # the loader expands $ORIGIN, not the shell
search='$ORIGIN/../lib/longstraw'
[ -z "${LIBTORCH:-}" ] || search=$(cd "$LIBTORCH" && pwd)/lib
cargo rustc --release --locked --bin longstraw -- -C "link-arg=-Wl,-rpath,$search"

if [ -z "${LIBTORCH:-}" ]; then
    new=$prefix/lib/.longstraw.new
    rm -rf "$new"
    mkdir "$new"
    cp -L .deps/libtorch/lib/*.so* "$new/"
    rm -rf "$prefix/lib/longstraw"
    mv "$new" "$prefix/lib/longstraw"
fi
# A rename, so that a run in progress keeps the binary it started with.
install -m 755 target/release/longstraw "$prefix/bin/.longstraw.new"
mv "$prefix/bin/.longstraw.new" "$prefix/bin/longstraw"

if missing=$(ldd "$prefix/bin/longstraw" | grep 'not found'); then
    printf 'install: %s does not find its libraries:\n%s\n' "$prefix/bin/longstraw" "$missing" >&2
    exit 1
fi
echo "installed $prefix/bin/longstraw"
case :$PATH: in
*:"$prefix/bin":*) ;;
*) echo "$prefix/bin is not on PATH; add it:  export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
