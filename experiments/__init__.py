"""Demonstrations and measurements; each is one command."""
