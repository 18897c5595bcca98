"""Tuning of problems to decisions: sweeps, jobs, controllers, surveys, revalidation, proofs."""
