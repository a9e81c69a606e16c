"""Collectives, sends and receives between ranks: in one process, over MPI, over NCCL."""
