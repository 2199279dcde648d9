"""Replays of jobs on a cluster, by forecast throughputs."""
