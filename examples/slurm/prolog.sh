#!/bin/bash
# Prolog= of slurm.conf: runs as root on each node of a job before the job's first step. It gives the job's account a spool and
# a running daemon, and tries both. A status other than 0 drains the node and requeues the job, so only what no job could
# train with ends so. A tier that fails does not: training goes on without it, and the daemon reports it.
set -u
PATH=/opt/tierd/bin:/usr/sbin:/usr/bin:/sbin:/bin

account=$SLURM_JOB_USER
spool=/nvme/tierd/$account
jobs=/run/tierd-jobs # which jobs an account has here; no command of Slurm is asked, because a prolog should call none

note() { logger --tag tierd-prolog -- "job $SLURM_JOB_ID of $account: $*"; }

install -d -o "$account" -g "$(id -g "$account")" -m 700 "$spool" || { note "no spool $spool"; exit 1; }
if [ ! -e "/etc/tierd/$account.toml" ]; then
  sed "s/@ACCOUNT@/$account/g" /etc/tierd/account.toml.in > "/etc/tierd/.$account.toml" &&
    mv "/etc/tierd/.$account.toml" "/etc/tierd/$account.toml" || { note "no configuration"; exit 1; }
fi
# Without a daemon a trainer writes its checkpoints itself, and the next daemon flushes them. But it resumes only from what
# this node's spool holds, and ends with an error if that is nothing.
install -d "$jobs" && exec 9>"$jobs/$account.lock" && flock 9 # an epilog may be stopping the daemon
install -d "$jobs/$account" && touch "$jobs/$account/$SLURM_JOB_ID"
systemctl start "tierd@$account" 9>&- || note "no daemon: systemctl status tierd@$account"
exec 9>&-

# 11: something that saves need fails on this node. 10, warnings, and 124, no answer in time, are no reason to drain a node.
found=$(timeout 60 runuser -u "$account" -- env -u SLURM_JOB_ID tierd doctor --spool "$spool" 2>&1)
if [ $? -eq 11 ]; then
  note "$found"
  exit 1
fi
exit 0
