"""How long an update takes: node profiles and the choice of stride."""
