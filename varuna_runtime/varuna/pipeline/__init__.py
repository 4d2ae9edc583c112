"""The pipeline of one replica: the engine that runs a stage's schedule, and the transport between stages."""
