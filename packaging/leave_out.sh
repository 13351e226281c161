#!/bin/sh -e
# Deletes from an environment what only compiles against its packages, or tests them: leave_out.sh FOLDER
cd "$1"/lib/python3*/site-packages
rm -rf torch/include torch/share torch/test
rm -f torch/lib/lib*_test.so torch/lib/libaoti_custom_ops.so torch/lib/libbackend_with_compiler.so
# torch looks for this one when it is imported
find torch/bin -type f ! -name torch_shm_manager -delete
find . -name '*.a' -type f -delete
find networkx numpy sympy -name tests -type d -prune -exec rm -rf {} +
