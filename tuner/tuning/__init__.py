"""From a problem to a decision: sweeps, jobs, controllers, surveys, revalidation."""
