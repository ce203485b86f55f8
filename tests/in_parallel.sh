#!/bin/sh
# in_parallel.sh COMMAND NAME...: run `sh -c COMMAND` once for every NAME, which it finds in $NAME, as jobs of the make that this
# runs under (so that `make -j2 test` has two jobs in all, however deep they are), else as many at a time as there are cores.
COMMAND=$1
shift
export COMMAND
case ${MAKEFLAGS-} in
*jobserver*) jobs= ;;
*) jobs=-j$(getconf _NPROCESSORS_ONLN) ;;
esac
printf '.PHONY: $(MAKECMDGOALS)\n$(MAKECMDGOALS):\n\t+@NAME=$@ sh -c "$$COMMAND"\n' |
    make $jobs -s --no-print-directory -f - "$@"
