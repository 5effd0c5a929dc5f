#!/bin/sh
# The server on the head of a Ray cluster:  serve.sh start CONFIG | wait | stop
# start returns at once, wait when the model is served; stop drains, and returns when all is over.
set -eu

state=$HOME/.novainfer
log=$state/log
pid_file=$state/pid

pid_of_server() { # nothing if it does not run
    [ -f "$pid_file" ] || return 0
    pid=$(cat "$pid_file")
    case $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) in *novainfer*) echo "$pid" ;; esac
}

start() {
    if [ -n "$(pid_of_server)" ]; then
        echo "the server runs already (pid $(pid_of_server)): serve.sh stop" >&2
        exit 1
    fi
    mkdir -p "$state"
    # In a session of its own: the terminal that `ray up` opened for this goes away.
    setsid nohup novainfer serve --config "$1" --ray-address auto --cluster-host auto --run-dir "$state/run" \
        </dev/null >"$log" 2>&1 &
    echo $! >"$pid_file"
    echo "novainfer starts (pid $!); its log is $log"
}

wait_until_ready() {
    pid=$(pid_of_server)
    if [ -z "$pid" ]; then
        tail -n 20 "$log" >&2
        echo "the server does not run" >&2
        exit 1
    fi
    # `tail` ends with the server, `grep` with the first line that it looks for.
    tail -n +1 -F --pid="$pid" "$log" | grep -m 1 "^NovaInfer is ready" || { tail -n 20 "$log" >&2; exit 1; }
}

stop() {
    pid=$(pid_of_server)
    if [ -n "$pid" ]; then
        kill -TERM "$pid"
        tail --pid="$pid" -f /dev/null
    fi
    rm -f "$pid_file"
}

case ${1:-} in
start) start "${2:?the configuration file}" ;;
wait) wait_until_ready ;;
stop) stop ;;
*)
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
    ;;
esac
