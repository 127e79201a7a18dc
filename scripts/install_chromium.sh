#!/usr/bin/env bash
# Make a headless Chromium available without touching the system. Optional: only the tests of the report page and of
# the status page use it. They are skipped where there is none, and fail under APEX_REQUIRE_BROWSER=1 (.ci/run).
#
# A Chromium on PATH is used as it is. Otherwise, on Debian (x86-64), the package and those of its libraries that the
# system lacks are unpacked into a private prefix, for the system's own loader:
#
#   ${APEX_CACHE_DIR:-~/.cache/apex}/chromium/bin/chromium      the wrapper to call
#   ${APEX_CACHE_DIR:-~/.cache/apex}/chromium/root/             the unpacked packages
#
# Needs no root and no change to the system's APT state. Exit status 0 only with a browser that has rendered a page.
set -euo pipefail

prefix="${APEX_CACHE_DIR:-${HOME:?is not set: set it or APEX_CACHE_DIR}/.cache/apex}/chromium"
wrapper="$prefix/bin/chromium"
log="$prefix.log"
work=""
new=""

cleanup() { rm -rf ${work:+"$work"} ${new:+"$new"}; }
trap cleanup EXIT

fail() {
    echo "chromium: not installed: $1" >&2
    [ -s "$log" ] && echo "chromium: the full log is $log" >&2
    exit 1
}

# A browser counts as installed only when it runs a page's script. It is given a profile of its own to throw away.
renders() {
    local probe status=0
    probe="$(mktemp -d)"
    echo '<p id="p">no</p><script>p.textContent = "ren" + "dered"</script>' >"$probe/page.html"
    timeout 60 "$1" --headless --no-sandbox --disable-gpu --user-data-dir="$probe/profile" --dump-dom \
        "file://$probe/page.html" >"$probe/dom" 2>"$probe/log" </dev/null && grep -q rendered "$probe/dom" || status=1
    [ "$status" -eq 0 ] || tail -n 3 "$probe/log"
    rm -rf "$probe"
    return "$status"
}

version_of() { "$1" --version 2>/dev/null | head -n 1; }

for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    if browser="$(command -v "$name")" && renders "$browser"; then
        echo "chromium: using the system's $browser ($(version_of "$browser"))"
        exit 0
    fi
done
if [ -x "$wrapper" ] && renders "$wrapper"; then
    echo "chromium: ready at $wrapper ($(version_of "$wrapper"))"
    exit 0
fi

mkdir -p "$(dirname "$prefix")" 2>/dev/null || fail "cannot write to $(dirname "$prefix")"
rm -f "$log"
# shellcheck source=/dev/null
[ "$(. /etc/os-release && echo "${ID:-}")-$(uname -m)" = "debian-x86_64" ] \
    || fail "there is a recipe for Debian on x86-64 only; install Chromium or Chrome yourself and put it on PATH"
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || fail "$tool not found; install Chromium yourself and put it on PATH"
done

# Private package lists from the system's own sources. The system's dpkg status says which libraries are there already.
work="$(mktemp -d)"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial"
apt_private() {
    LC_ALL=C timeout --foreground 300 apt-get -q -y \
        -o Dir::State="$work/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$work/cache" \
        -o APT::Sandbox::User="$(id -un)" -o APT::Sandbox::Seccomp=false -o Debug::NoLocking=true \
        -o Acquire::Languages=none -o Acquire::Retries=2 "$@" >>"$log" 2>&1 </dev/null
}
echo "chromium: fetching chromium-headless-shell and what it needs (about 100 MB) into $prefix"
apt_private update || echo "chromium: not every package source answered; trying with those that did"
apt_private install --download-only --no-install-recommends chromium-headless-shell fonts-dejavu-core \
    || fail "cannot download the package: $(grep -m 1 '^E:' "$log" || true)"

new="$prefix.new.$$"
rm -rf "$new"
mkdir -p "$new/root" "$new/bin"
for package in "$work"/cache/archives/*.deb; do
    [ -e "$package" ] || fail "the system says that chromium-headless-shell is installed, but it does not work"
    dpkg-deb -x "$package" "$new/root" >>"$log" 2>&1 || fail "cannot unpack $(basename "$package")"
done
browser="$new/root/usr/lib/chromium/chromium-headless-shell"
[ -x "$browser" ] || browser="$(find "$new/root" -type f -name '*headless*shell' -perm -u+x | head -n 1)"
[ -n "$browser" ] || fail "the package holds no headless shell"

# Some libraries lie in folders of their own. The wrapper finds the prefix from its own path, so it may be moved.
libraries="$(cd "$new/root" && find . -name '*.so*' -printf '$root/%P\n' | sed 's|/[^/]*$||' | sort -u | paste -sd :)"
cat >"$new/bin/chromium" <<WRAPPER
#!/bin/sh
root="\$(dirname "\$(dirname "\$(readlink -f "\$0")")")/root"
export LD_LIBRARY_PATH="$libraries"
exec "\$root${browser#"$new/root"}" "\$@"
WRAPPER
chmod +x "$new/bin/chromium"
renders "$new/bin/chromium" >>"$log" 2>&1 || fail "the unpacked browser does not work here: $(tail -n 1 "$log")"

rm -rf "$prefix"
mv "$new" "$prefix"
rm -f "$log"
echo "chromium: installed at $wrapper ($(version_of "$wrapper"), $(du -sh "$prefix" | cut -f 1))"
