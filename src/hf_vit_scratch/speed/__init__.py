"""What suits the machine that a run is on."""
