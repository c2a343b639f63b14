#!/bin/sh
# Print the first Python on PATH that is 3.11 to 3.14 and can make a virtual environment.
# A python3.13 on PATH can be a shim that fails, so each candidate is tried, not trusted.
for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
        >/dev/null 2>&1; then
        command -v "$candidate"
        exit 0
    fi
done
echo "smfree needs Python 3.11 to 3.14 with venv and ensurepip on PATH (Debian: apt-get install python3-venv)" >&2
exit 1
