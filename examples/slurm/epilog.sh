#!/bin/bash
# Epilog= of slurm.conf: runs as root on each node of a job after its last process. It flushes what the job saved before the
# node is given to the next job, and stops the daemon if the account has no other job here. It always ends with 0, because
# another status drains the node: what could not be flushed stays in the spool, and the daemon goes on trying.
set -u
PATH=/opt/tierd/bin:/usr/sbin:/usr/bin:/sbin:/bin

account=$SLURM_JOB_USER
spool=/nvme/tierd/$account
jobs=/run/tierd-jobs

note() { logger --tag tierd-epilog -- "job $SLURM_JOB_ID of $account: $*"; }

rm -f "$jobs/$account/$SLURM_JOB_ID"
# Keep the deadline below PrologEpilogTimeout.
if ! left=$(runuser -u "$account" -- tierd drain --spool "$spool" --deadline 4m 2>&1); then
  note "$left"
  exit 0
fi
exec 9>"$jobs/$account.lock" && flock 9
rmdir "$jobs/$account" 2>/dev/null && systemctl stop "tierd@$account" 9>&- # it is not empty while another job runs here
exit 0
