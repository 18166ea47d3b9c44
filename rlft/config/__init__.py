"""YAML and the command line to one typed config a command: composing, the schema, overrides."""
