"""Worker groups in this process and on Ray, their placement, and the roles of a run that they hold."""
