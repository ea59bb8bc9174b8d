#!/usr/bin/env bash
# Start torchrun on several machines with the settings that restarts need. Run the same command on each machine, in any
# order; one of them has the endpoint:
#   scripts/torchrun.sh --nnodes=1:3 --max-restarts=100 --rdzv-endpoint=10.0.0.1:29500 \
#       src/train.py strategy=ddp pieces=6
# All arguments go to torchrun. They override the settings of this script: --rdzv-conf=..., --local-addr=...
set -euo pipefail
fail() {
    echo "error: $*" >&2
    exit 2
}

# without an activated environment, that of the project
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $(command -v torchrun) || ! -x $project/.venv/bin/python3 ]] || export PATH=$project/.venv/bin:$PATH

endpoint='' machines=''
for ((at = 1; at <= $#; at++)); do
    case ${!at} in
        --rdzv[-_]endpoint=*) endpoint=${!at#*=} ;;
        --rdzv[-_]endpoint) next=$((at + 1)) && endpoint=${!next-} ;;
        --nnodes=*) machines=${!at#*=} ;;
        --nnodes) next=$((at + 1)) && machines=${!next-} ;;
        -*) ;;
        *.py) break ;; # later arguments are for the program
    esac
done
# Each round of workers uses a new store. The agents' store has keys of the earlier round, with which half of the
# restarts hang.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Workers are forks of a process that has imported everything. PYTHON_EXEC=python makes them new Python processes.
torchrun=(torchrun) forks=lockstep.programs.workers.torchrun
[[ ! ${PYTHON_EXEC-} ]] && python3 -c 'import lockstep.programs' 2>/dev/null && torchrun=(python3 -m "$forks")
[[ $endpoint ]] || exec "${torchrun[@]}" "$@" # one machine
[[ $(command -v ip) ]] || fail "the command ip is missing: install iproute2"

host=${endpoint%:*}
address=$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }') || true
[[ $address ]] || fail "--rdzv-endpoint=$endpoint: this machine finds no address of $host: give an IPv4 address"
# Addresses of this machine, with their interfaces. Its host name may resolve to a loopback address (Debian: 127.0.1.1),
# which other machines can't reach.
mine=$(ip -4 -oneline address show scope global | awk '{ sub("/.*", "", $4); print $4, $2 }')
if [[ $address == 127.* ]]; then
    [[ $(wc -l <<<"$mine") == 1 ]] ||
        fail "--rdzv-endpoint=$endpoint: $host is $address here, which others can't reach: give an address," \
            ${mine//$'\n'/ or }
    address=${mine% *}
fi
is_host=0 local=$(ip -4 route get "$address" | awk '{ for (at = 1; at < NF; at++) if ($at == "src") print $(at + 1) }')
[[ $local == "$address" ]] && is_host=1
GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME-$(awk -v address="$local" '$1 == address { print $2 }' <<<"$mine")}
export GLOO_SOCKET_IFNAME
# If fewer machines may continue the run (--nnodes=1:3), rank zero takes no step after 3 s without an answer of the
# store: lockstep/callbacks/store_lease.py.
port=${endpoint##*:}
[[ $port == "$endpoint" ]] && port=29400 # torchrun's
[[ $machines == *:* ]] && export LOCKSTEP_RDZV_STORE=$address:$port
# A lost machine is detected after 3 s instead of 15 s. The clocks of all machines must agree within 3 s.
conf=is_host=$is_host,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,read_timeout=60
exec "${torchrun[@]}" --rdzv-backend=c10d --local-addr="$local" --rdzv-conf="$conf" "$@"
