"""HTTP service: lookups, snapshots, and jobs to submit and watch.

It accepts only names and numbers, never source, flags, paths or binaries. Every answer comes from
the store.
"""
