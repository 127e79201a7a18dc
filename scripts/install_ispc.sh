#!/usr/bin/env bash
# Make the ISPC compiler available without touching the system.
#
# A system `ispc` on PATH is used as it is. Otherwise, on Debian or Ubuntu (x86-64), the package and every
# library it needs are unpacked into a private prefix and started through that prefix's own loader:
#
#   ${APEX_CACHE_DIR:-~/.cache/apex}/ispc/bin/ispc      the wrapper to call
#   ${APEX_CACHE_DIR:-~/.cache/apex}/ispc/root/         the unpacked packages
#
# Needs no root and no change to the system's APT state. ISPC is optional: whatever goes wrong, the reason is
# printed and the exit status is 0, because the build then goes on with the other CPU attention kernels.
set -euo pipefail

prefix="${APEX_CACHE_DIR:-${HOME:?is not set: set it or APEX_CACHE_DIR}/.cache/apex}/ispc"
wrapper="$prefix/bin/ispc"
log="$prefix.log"
work=""
new=""

cleanup() { rm -rf ${work:+"$work"} ${new:+"$new"}; }
trap cleanup EXIT

skip() {
    echo "ispc: not installed: $1"
    [ -s "$log" ] && echo "ispc: the full log is $log"
    echo "ispc: the build goes on without it; the other CPU attention kernels serve."
    exit 0
}
trap 'skip "line $LINENO of $0 failed"' ERR

# A compiler counts as installed only when it turns a real kernel into an object file.
compiles() {
    local probe status=0
    probe="$(mktemp -d)"
    echo 'export void probe(uniform float x[], uniform int n) { foreach (i = 0 ... n) x[i] *= 2.0f; }' \
        >"$probe/probe.ispc"
    "$1" --target=host --pic "$probe/probe.ispc" -o "$probe/probe.o" >"$probe/log" 2>&1 \
        && [ -s "$probe/probe.o" ] || status=1
    [ "$status" -eq 0 ] || tail -n 3 "$probe/log"
    rm -rf "$probe"
    return "$status"
}

version_of() { "$1" --version 2>/dev/null | head -n 1; }

# The archive the system itself uses. `apt-get indextargets` reads every format of source list.
system_mirror() {
    apt-get indextargets --format '$(COMPONENT) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null \
        | awk -v path="/$1\$" '{ sub("/+$", "", $2) } $1 == "main" && $2 ~ path { print $2; exit }'
}

if system_ispc="$(command -v ispc)" && [ "$system_ispc" != "$wrapper" ] && compiles "$system_ispc"; then
    echo "ispc: using the system's $system_ispc ($(version_of "$system_ispc"))"
    exit 0
fi
if [ -x "$wrapper" ] && compiles "$wrapper"; then
    echo "ispc: ready at $wrapper ($(version_of "$wrapper"))"
    exit 0
fi

mkdir -p "$(dirname "$prefix")" 2>/dev/null || skip "cannot write to $(dirname "$prefix")"
rm -f "$log"
[ "$(uname -s)-$(uname -m)" = "Linux-x86_64" ] || skip "no recipe for $(uname -s) on $(uname -m)"
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || skip "$tool not found; install ispc yourself and put it on PATH"
done

# Debian has packaged ISPC since trixie, Ubuntu has it in universe of its own release.
# shellcheck source=/dev/null
. /etc/os-release
case "${ID:-}" in
    debian) archive=debian suite=trixie components=main ;;
    ubuntu) archive=ubuntu suite="${VERSION_CODENAME:-}" components="main universe" ;;
    *) skip "no recipe for ${PRETTY_NAME:-this distribution}; install ispc yourself and put it on PATH" ;;
esac
keyring="/usr/share/keyrings/$archive-archive-keyring.gpg"
[ -r "$keyring" ] || skip "$keyring is missing, so packages could not be verified"
mirror="$(system_mirror "$archive")" || true
[ -n "$mirror" ] || skip "the system's package sources name no $archive archive"

# A private APT state: own lists, own cache, an empty dpkg status (so that libc and the loader come along too)
# and one source line. Everything else of the system's APT configuration, a proxy for instance, stays in force.
work="$(mktemp -d)"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/none"
: >"$work/status"
echo "deb [arch=amd64 signed-by=$keyring] $mirror $suite $components" >"$work/sources.list"
apt_private() {
    LC_ALL=C timeout 300 apt-get -q -y \
        -o Dir::State="$work/state" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts="$work/none" \
        -o Dir::Etc::preferences="$work/none/preferences" -o Dir::Etc::preferencesparts="$work/none" \
        -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o APT::Sandbox::User="$(id -un)" \
        -o Acquire::Languages=none -o Acquire::Retries=2 -o APT::Update::Error-Mode=any \
        -o APT::Get::List-Cleanup=false -o APT::Sandbox::Seccomp=false "$@" >>"$log" 2>&1 </dev/null
}
echo "ispc: fetching the $suite package and its libraries (about 50 MB) into $prefix"
apt_private update || skip "cannot read the $suite package list (no network?): $(grep -m 1 '^E:' "$log" || true)"
apt_private install --download-only --no-install-recommends ispc \
    || skip "cannot download the package: $(grep -m 1 '^E:' "$log" || true)"

new="$prefix.new.$$"
rm -rf "$new"
mkdir -p "$new/root" "$new/bin"
for package in "$work"/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$new/root" >>"$log" 2>&1 || skip "cannot unpack $(basename "$package")"
done
loader="$(find "$new/root" -name 'ld-linux-x86-64.so.2' -path '*x86_64-linux-gnu*' | head -n 1)"
[ -n "$loader" ] && [ -x "$new/root/usr/bin/ispc" ] || skip "the packages hold no ispc with its loader"

# The wrapper finds the prefix from its own path, so the prefix may be moved. --inhibit-cache and --library-path
# keep the loader from mixing in the system's (older) libraries.
cat >"$new/bin/ispc" <<WRAPPER
#!/bin/sh
root="\$(dirname "\$(dirname "\$(readlink -f "\$0")")")/root"
libraries="\$root/usr/lib/x86_64-linux-gnu:\$root/lib/x86_64-linux-gnu:\$root/usr/lib/llvm-19/lib"
exec "\$root${loader#"$new/root"}" --inhibit-cache --library-path "\$libraries" "\$root/usr/bin/ispc" "\$@"
WRAPPER
chmod +x "$new/bin/ispc"
compiles "$new/bin/ispc" || skip "the unpacked compiler does not work here"

rm -rf "$prefix"
mv "$new" "$prefix"
rm -f "$log"
echo "ispc: installed at $wrapper ($(version_of "$wrapper"))"
