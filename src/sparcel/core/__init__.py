"""What every step runs: streams, formats, communicators, collectives, schemes, drivers."""
