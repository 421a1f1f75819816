#!/bin/bash
# A real S3 server for the system tests: Ceph's RADOS gateway over one monitor and one OSD, on loopback.
#
#   s3server.sh install            unpack Ceph into its own Debian tree (about 1 min, 1 GB; once)
#   s3server.sh start              bring it up, creating the cluster and the test user the first time
#   s3server.sh stop [SIGNAL]      end it by its pid files (TERM; KILL plays a crash)
#   s3server.sh env                print the variables that tests/system/test_s3.py reads
#
# Needs root on Debian 12. Every command may be repeated. Ceph is not in Debian 12, so it comes from a later suite and runs
# in a chroot: nothing of it touches the machine's own packages.
set -euo pipefail

TREE=${S3SERVER_TREE:-/opt/ceph20}          # where the Debian tree with Ceph lies
DATA=${S3SERVER_DATA:-/var/tmp/tierd-s3}    # keys, monitor and OSD; delete it to begin with an empty cluster
PORT=${S3SERVER_PORT:-7480}                 # the S3 endpoint; the two ports above it are the monitor's
ACCESS_KEY=testkey SECRET_KEY=testsecret
DAEMONS="client.rgw osd.0 mon.a"            # in the order in which they stop

inside() { CEPH_CONF=/s3/ceph.conf CEPH_KEYRING=/s3/keyring chroot "$TREE" "$@"; }
answers() { curl -sfo /dev/null "http://127.0.0.1:$PORT/"; }
uuid() { cat /proc/sys/kernel/random/uuid; }

mirror() {  # the one that this machine's apt already uses, in either of its two file formats
  { sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources
    sed -n 's/^deb \(\[[^]]*\] \)\?\([^ ]*\).*/\2/p' /etc/apt/sources.list /etc/apt/sources.list.d/*.list
  } 2>/dev/null | sed -n 1p
}

install() {
  [ ! -x "$TREE/usr/bin/radosgw" ] || return 0
  if ! command -v mmdebstrap >/dev/null; then
    apt-get update -q
    apt-get install -yq --no-install-recommends mmdebstrap
  fi
  # A mirror that is frozen in time has expired signatures' dates, not wrong signatures.
  mmdebstrap --variant=apt --include=radosgw,ceph-mon,ceph-osd \
    --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' forky "$TREE" "$(mirror)"
}

write_config() {  # one of everything, small, and no replica
  cat >"$DATA/ceph.conf" <<CONF
[global]
fsid = $1
mon host = $2
public addr = 127.0.0.1
keyring = /s3/keyring
run dir = /s3
admin socket = /s3/\$name.asok
pid file = /s3/\$name.pid
log file = /s3/\$name.log
mon data = /s3/mon
osd data = /s3/osd
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd client watch timeout = 8
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
bluestore block size = 17179869184
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$PORT tcp_nodelay=1
CONF
}

create_monitor() {
  local fsid monitor name
  fsid=$(uuid) monitor="[v2:127.0.0.1:$((PORT + 1)),v1:127.0.0.1:$((PORT + 2))]"
  rm -rf "$DATA/mon" "$DATA/osd" "$DATA/keyring"
  mkdir -p "$DATA/mon" "$DATA/osd"
  write_config "$fsid" "$monitor"
  inside ceph-authtool --create-keyring /s3/keyring --gen-key -n mon. --cap mon 'allow *'
  for name in client.admin client.rgw osd.0; do
    inside ceph-authtool /s3/keyring --gen-key -n "$name" --cap mon 'allow *' --cap osd 'allow *'
  done
  inside monmaptool --create --clobber --fsid "$fsid" --addv a "$monitor" /s3/monmap
  inside ceph-mon --mkfs -i a --monmap /s3/monmap --keyring /s3/keyring
}

create_osd() {
  local id
  id=$(uuid)
  inside ceph osd new "$id"
  inside ceph-osd -i 0 --mkfs --osd-uuid "$id"
}

create_user() {
  inside radosgw-admin -n client.rgw user create --uid=test --display-name=test \
    --access-key="$ACCESS_KEY" --secret-key="$SECRET_KEY" >/dev/null
}

start() {
  install
  answers && [ -e "$DATA/ready" ] && return 0
  # The mounts that the chroot needs live in a mount namespace of the daemons', and end with them.
  [ -n "${S3SERVER_UNSHARED:-}" ] || exec env S3SERVER_UNSHARED=1 unshare -m --propagation private "$0" start
  mkdir -p "$DATA" "$TREE/s3"
  for fs in proc sys dev; do mount --rbind "/$fs" "$TREE/$fs"; done
  mount --bind "$DATA" "$TREE/s3"

  local fresh=  # a cluster whose creation was cut short is created anew: `ready` is written last
  [ -e "$DATA/ready" ] || { fresh=1; create_monitor; }
  inside ceph-mon -i a
  [ -z "$fresh" ] || create_osd
  inside ceph-osd -i 0
  inside radosgw -n client.rgw
  for _ in {1..600}; do answers && break; sleep 0.1; done
  answers || { echo "s3server.sh: no answer on port $PORT after 60 s; see $DATA/*.log" >&2; exit 1; }
  [ -z "$fresh" ] || { create_user; touch "$DATA/ready"; }
}

stop() {
  local name pid
  for name in $DAEMONS; do
    pid=$(cat "$DATA/$name.pid" 2>/dev/null) || continue
    # A pid file can outlive its process (a reboot): only a Ceph daemon is signalled.
    if [[ $(readlink "/proc/$pid/exe") == */bin/@(radosgw|ceph-osd|ceph-mon)* ]]; then
      kill -s "${1:-TERM}" "$pid" || true
      while [ -n "$(readlink "/proc/$pid/exe")" ]; do sleep 0.1; done
    fi
    rm -f "$DATA/$name.pid"
  done
}

case ${1:-} in
install) install ;;
start) start ;;
stop) stop "${2:-TERM}" ;;
env)
  echo "export TIERD_TEST_S3_ENDPOINT=http://127.0.0.1:$PORT"
  echo "export TIERD_TEST_S3_ACCESS_KEY=$ACCESS_KEY TIERD_TEST_S3_SECRET_KEY=$SECRET_KEY"
  ;;
*) sed -n 's/^# \{0,1\}//; 2,9p' "$0" >&2; exit 2 ;;
esac
