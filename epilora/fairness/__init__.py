"""Who goes next: tenants and RL jobs by virtual token counters, rollouts behind tenants' promises. Standard library."""
