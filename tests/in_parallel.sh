#!/bin/sh
# in_parallel.sh COMMAND NAME...: run `sh -c COMMAND` once for every NAME (as $NAME), in parallel: as jobs of the make above, if
# there is one (`make -j2` then runs two jobs in all, at any depth), else one job per core.
COMMAND=$1
shift
export COMMAND
case ${MAKEFLAGS-} in
*jobserver*) jobs= ;;
*) jobs=-j$(getconf _NPROCESSORS_ONLN) ;;
esac
printf '.PHONY: $(MAKECMDGOALS)\n$(MAKECMDGOALS):\n\t+@NAME=$@ sh -c "$$COMMAND"\n' |
    make $jobs -s --no-print-directory -f - "$@"
