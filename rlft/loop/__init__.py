"""What happens around a step: a run put together, engines, evaluation, freshness, metrics, saving."""
