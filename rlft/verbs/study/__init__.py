"""Sweeps whose values Optuna chooses: `rlft <verb> -m sweep=optuna ..`. A study has trials, a trial a run a seed."""
