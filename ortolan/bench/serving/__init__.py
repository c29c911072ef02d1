"""What `ortolan bench --serve` measures with: load, connections to servers, rounds, reports.

`rounds.run_serve_bench` is the way in. One process and one event loop make all the load, since
they share the machine with the server: while a round runs, answers are only stamped and kept;
they are read after it.
"""
