"""The Python face of burnish: the commands as functions, a finished run as an object, and a policy for loops of your own."""
