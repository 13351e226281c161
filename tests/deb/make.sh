#!/bin/sh -e
# Makes environment, pages, completions and package in a chroot of the suite; /build has the parts.
cd /build
venv=/usr/lib/penstock
python3 -m venv $venv
$venv/bin/pip install -q --no-compile --no-cache-dir --no-deps --require-hashes -r requirements.txt
$venv/bin/pip install -q --no-compile --no-cache-dir --no-deps --no-index penstock-*.whl
$venv/bin/pip uninstall -q -y pip
sh leave_out.sh $venv
$venv/bin/python debian/copyright.py > debian/copyright
find $venv/bin -type f ! -name penstock -delete
rm -f $venv/.gitignore # of venv since Python 3.13
# The service may not write bytecode, and would compile at each start. One file is for a newer Python.
$venv/bin/python -m compileall -q -j 0 -x py312_intrinsics --invalidation-mode unchecked-hash $venv/lib

ln -s $venv/bin/penstock /usr/bin/penstock
mkdir -p share/bash-completion/completions share/zsh/vendor-completions \
    share/fish/vendor_completions.d share/man/man1
penstock completion bash > share/bash-completion/completions/penstock
penstock completion zsh > share/zsh/vendor-completions/_penstock
penstock completion fish > share/fish/vendor_completions.d/penstock.fish
version=$(penstock --version)
$venv/bin/python debian/verbs.py > verbs
while IFS='	' read -r words about; do
    page=share/man/man1/$(echo "$words" | tr ' ' -).1
    option=--help
    [ "$words" != "penstock serve" ] || option=--help-all
    help2man --no-info --locale=C.UTF-8 --version-string="$version" --help-option="$option" \
        --name="$about" --output="$page" "$words"
    name=$(basename "$page" .1)  # help2man takes the name of the program alone
    sed -i "s/^penstock \\\\- /$name \\\\- /; s/^.TH PENSTOCK /.TH $name /" "$page"
done < verbs

debian/rules binary
