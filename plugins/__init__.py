"""Your own environments, rewards and dataset sources: a module here is named `plugins.<module>:<attr>` in params.yaml."""
