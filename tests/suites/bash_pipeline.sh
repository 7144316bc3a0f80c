#!/bin/bash
# A pipeline of ordinary tools, command substitution, arrays, traps, a background job.
beats() { printf '%019d\n' "$1" 1<>"$BELAY_TEST_BEAT"; }
fail() { echo "FAIL bash_pipeline: $*"; exit 1; }
trap 'hits=$((hits + 1))' USR1
hits=0
want=$(seq 1 2000 | awk '{ s += $1 * $1 } END { print s }')
sleep 100000 &
bg=$!
coproc cat
n=0
until [ -e "$BELAY_TEST_GO" ]; do
    n=$((n + 1))
    beats $n
    got=$(seq 1 2000 | tac | grep -v x | sort -n | awk '{ s += $1 * $1 } END { print s }') || fail "pipeline status $?"
    [ "$got" = "$want" ] || fail "pipeline printed '$got', expected $want"
    seq 1 300 | (exit 3) | cat >/dev/null
    stages=${PIPESTATUS[*]}
    [ "$stages" = "141 3 0" ] || [ "$stages" = "0 3 0" ] || fail "exit statuses of the pipeline: $stages"
    kill -0 $bg || fail "the background job died"
    echo "line $n" >&"${COPROC[1]}"
    read -r -t 20 back <&"${COPROC[0]}" || fail "the coprocess does not answer"
    [ "$back" = "line $n" ] || fail "the coprocess said $back"
    kill -USR1 $$
    [ "$hits" -eq "$n" ] || fail "trap ran $hits times, expected $n"
    sum=$(echo "abc $n" | md5sum | cut -c1-8)
    [ "$sum" = "$(md5sum <<<"abc $n" | cut -c1-8)" ] || fail "md5sum"
done
kill $bg
wait $bg
[ $? -eq 143 ] || fail "the background job's status"
echo "PASS bash_pipeline $n rounds"
