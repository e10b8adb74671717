"""How facts are shown: tables, units, JSON, HTML, and the files that are written. Knows no verb."""
