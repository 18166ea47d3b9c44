"""YAML and the command line to one typed config a verb: composing, the schema, overrides."""
