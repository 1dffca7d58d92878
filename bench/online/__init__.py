"""The serving benchmark: a client of any OpenAI-compatible server, and of the engine without one.

    python -m bench.online --base-url http://127.0.0.1:8000 --scenario realistic-decode

plan        requests with lengths, prompts and arrival times, drawn from a seed
driver      sends each when it is due, waits for none that is open loop
sender      one request over HTTP: when its pieces arrive, and how it ends
direct      the same without HTTP, on the engine's asyncio front end
processes   several client processes for loads that one Python process cannot keep up with
ceiling     what the client itself can receive
metrics     from what was seen to latencies, throughput and goodput
report      tables for the terminal and, from JSON, for the docs; plot: the curves
saturation  starts a server for each engine and sweeps the rate on it
"""
