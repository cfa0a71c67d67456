"""Tests of polyturn: unit/ mirrors the package, contract/ holds rules, e2e/ runs pipelines."""
