"""The HTTP face: configurations to look up, a snapshot to pull, jobs to submit and watch.

It takes names and numbers only. No source, flag, path or binary goes in, and every answer comes
from the store.
"""
