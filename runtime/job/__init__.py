"""What the processes of a launched job share: files, heartbeats, time limits, reports of failures."""
