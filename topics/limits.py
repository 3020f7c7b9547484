"""Every bound of the system, each with its reason.

Limits a client can meet have an environment variable (see settings.py) and stand here as the default.
The others protect one process from another and are not for tuning.
"""

KIB = 1024
MIB = 1024 * KIB

# --- What one request may carry (contract §2) --------------------------------------------------------
MAX_BATCH_RECORDS = 10_000
MAX_RECORD_BYTES = 1 * MIB  # data + meta: one record can't fill a commit
MAX_BODY_BYTES = 64 * MIB  # before parsing, and again after gunzip
CONTROL_BODY_BYTES = 256 * KIB  # of every body but an append's: it names things, and is decoded in one go
MAX_META_BYTES = 16 * KIB
MAX_META_KEYS = 64
META_DEPTH = 400  # levels of a meta that are always taken: all who read it go down as deep, and their stacks end
MAX_TAG_BYTES = 256
MAX_NODE_BYTES = 128
MAX_KEY_CHARS = 256  # idempotency_key
MAX_NAME_CHARS = 255

# --- What one answer may carry (contract §3, §11) ----------------------------------------------------
DEFAULT_LIMIT = 256
MAX_LIMIT = 1_000
DEFAULT_BATCH_BYTES = 1 * MIB  # at least one record is always delivered
MAX_BATCH_BYTES = 8 * MIB
MAX_WAIT_MS = 30_000
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1_000
MAX_READ_NODES = 1_000  # node ids in one read's filter

METRICS_TOPICS = 1_000  # in the block about topics: what a scrape may cost
SCRAPE_MS = 50  # from one making of the metrics to the next: each is milliseconds in which nothing else is done ...
SCRAPE_CROWD = 4  # ... and with more requests than this waiting for it ...
SCRAPE_CROWD_MS = 1_000  # ... it is this long
SCRAPES_WAITING = 256  # requests for metrics that wait in one gateway: all are answered together; more are refused

# --- Watching (contract §7) --------------------------------------------------------------------------
DEFAULT_WATCH_BATCH_BYTES = 256 * KIB
HEARTBEAT_MS_RANGE = (1_000, 60_000)
DEFAULT_HEARTBEAT_MS = 15_000
SESSION_TTL_MS = 300_000
STREAM_BACKLOG_BYTES = 256 * KIB  # frames a client has not taken; beyond that it lags and reads on from the log later
SLOW_CONSUMER_TIMEOUT_MS = 30_000
SLOW_CLOSE_MS = 5_000  # how long the final error frame may take to get out
RESTORE_WAIT_MS = 2_000  # how long the sessions' home waits to hear from every gateway after it died
WATCH_READS = 4  # topics that one watcher catches up with at the same time
WS_REQUEST_ID_BYTES = 256  # of JSON: it is kept until the command is answered, and comes back in the answer
WS_PING_MS = 30_000  # a silent WebSocket is pinged ...
WS_SILENCE_MS = 90_000  # ... and one that stays silent is closed
STREAM_TIMEOUT_MS = 60_000  # the kernel drops a stream's connection if the peer has acknowledged nothing for so long

# --- Instance-wide resources (contract §11); 0 means unlimited ----------------------------------------
MAX_TOPICS = 100_000
MAX_ROUTERS = 10_000
MAX_WATCH_SESSIONS = 10_000
MAX_SSE_CONNECTIONS = 10_000
MAX_SSE_CONNECTIONS_PER_KEY = 1_000
MAX_INFLIGHT_PER_KEY = 1_000
MAX_API_KEYS = 1_000  # a head that is new is compared with all of them
MAX_API_KEYS_BYTES = 160 * KIB  # as a child is told them: a control message has 192 KiB
MAX_KEY_FILE_BYTES = 1 * MIB
MAX_KEY_NAME_CHARS = 64
MAX_TOTAL_BYTES = 0
MAX_WATCH_TOPICS = 256
MAX_CLAIM = 1_000

# --- Queues (contract §10) ---------------------------------------------------------------------------
MAX_LEASES = 250_000  # jobs of one queue that are leased, delayed or wait for redelivery: all of them are in memory
CLAIM_BYTES = 8 * MIB  # of jobs in one answer; at least one is always delivered
DELAY_MS_RANGE = (0, 86_400_000)
LEASE_HISTORY_BYTES = 64 * MIB  # of a queue's leases log, beyond what a restart needs
LEASE_CHECKPOINT_EVENTS = 20_000  # jobs named by events before the table is written down as a whole again
DEAD_LETTER_RETRY_MS = (500, 30_000)  # first and longest pause before a refused move is tried again
DEAD_LETTER_BATCH = 256  # jobs moved at once
ORPHAN_MS = 2_000  # after a restart connections have this long to come back to their leases
QUEUE_IDLE_MS = 60_000  # a queue without leases and without requests is forgotten

# --- Topic config (contract §0.10) -------------------------------------------------------------------
U64_MAX = 2**64 - 1
PRIORITY_RANGE = (-1_000, 1_000)
LEASE_MS_RANGE = (100, 86_400_000)
CLAIM_JITTER_MS_RANGE = (0, 5_000)
DEFAULT_IDEMPOTENCY_WINDOW_MS = 120_000
DEFAULT_LEASE_MS = 30_000

# --- HTTP: what a connection may cost before it has shown a request -----------------------------------
MAX_HEAD_BYTES = 32 * KIB  # request line and all headers
MAX_HEADERS = 100
MAX_URI_BYTES = 8 * KIB
MAX_PIPELINED = 128  # requests of one connection in flight; beyond that we stop reading from it
MAX_PIPELINED_ASKS = 16  # of those, requests whose answer may be large
SMALL_BODY_BYTES = 64 * KIB  # up to here a request is small: when memory is short, large ones are refused before it
MAX_BUFFERED_BYTES = 128 * MIB  # of clients in all gateways: two bodies of the largest size, or 2,000 small ones
UNREAD_BYTES = 4 * MIB  # answers of one connection that its client has not taken; beyond it no more is asked for it
MAX_CONNECTIONS = 20_000  # of all gateways
MAX_CONNECTIONS_PER_PEER = 10_000  # of one address: half, so that no client keeps out all others, and a proxy has room
GUESTS = 16  # connections without a place that may ask for health and metrics
GUEST_STAY_MS = 3_000  # after this a guest makes room for the next whatever it waits for; a scrape waits for one second
SPARE_FILES = 16  # descriptors that a gateway keeps for files of its own
HEAD_TIMEOUT_MS = 10_000  # from the first byte of a head to its end
BODY_TIMEOUT_MS = 30_000  # without any progress of the body
IDLE_TIMEOUT_MS = 120_000  # keep-alive without a request
MIN_BODY_RATE = 500  # bytes per second, over a body or an answer that takes longer than BODY_TIMEOUT_MS
MAX_REQUEST_ID_CHARS = 128
H2_STREAM_BYTES = 32 * KIB  # what a stream costs beside its head, which is kept as bytes and as text
H2_OPEN_BYTES = 6 * MIB  # of one connection's streams, so counted: 100 streams with heads of 14 KiB
H2_NUISANCES = 200  # frames that cost us work and carry nothing (resets, pings, settings): so many at once ...
H2_NUISANCES_PER_S = 20  # ... and so many more per second; a client with more is sent away
GZIP_MIN_BYTES = 1 * KIB  # below this gzip makes answers larger
GZIP_SLICE_BYTES = 64 * KIB  # of an answer, compressed at once: 1.6 ms for random base64, which takes longest

# --- Between processes -------------------------------------------------------------------------------
RING_BYTES = 8 * MIB
MIN_RING_BYTES = 64 * KIB
DRAIN_BYTES = 4 * MIB  # one wake-up takes at most this much from one ring before the others get their turn
PUSH_BYTES = 1 * MIB  # what one round may send a follower unasked
PLACED_BYTES = 8 * MIB  # a larger batch is written to the log by a thread: the loop would take 20 ms for this much
PLACED_WAITING_BYTES = 256 * MIB  # of such batches in one shard; more are refused
CALL_TIMEOUT_MS = 15_000  # a call unanswered for this long is answered 503, outcome unknown
HEARTBEAT_MS = 1_000
HEARTBEAT_MISSES = 5
BUSY_SHARE = 0.1  # of a processor: a silent child that uses so much is busy, not stuck; threads at rest use less
BUSY_LIMIT_MS = 60_000  # the longest work without a heartbeat: an endless loop looks the same, and ends here
RESTARTS_PER_MINUTE = 5  # of a process that is no gateway; after that it stays down
GATEWAY_PAUSE_MS = (100, 10_000)  # before a gateway is started again: first and longest; it doubles with each death
STOP_TIMEOUT_MS = 20_000  # a child that has not stopped by then is killed
LEAVE_MS = 60_000  # how long clients of a gateway that was replaced may take to read their last answers
HOLD_BYTES = 64 * MIB  # of requests that one gateway keeps back while a process is replaced; more are refused

# --- Under pressure ----------------------------------------------------------------------------------
PRESSURE_LAG_MS = 500  # a round of a process's loop that takes this long is full pressure ...
PRESSURE_COMMIT_MS = 2_000  # ... as is a sync that takes this long, or a ring that is full
PRESSURE_TICK_MS = 50
PRESSURE_HOLD_MS = 200  # so long below a level before it is left
COALESCE_MS = 5  # pushes are held back this long to become fewer and larger
COMMIT_WINDOW_MS = 10  # between two syncs, so that more batches share one
THROTTLE_RETRY_MS = (250, 5_000)  # what a refused client is told to wait
PARK_MS = 5_000  # a write that won't be refused waits this long at most
PARK_BYTES = 256 * MIB  # of such writes in one gateway; what comes on top is refused all the same
PACE_RETRY_MS = 1_500
PACE_FRAME_MS = 5_000  # a stream is told at most this often that it is paced

# --- Disk --------------------------------------------------------------------------------------------
MIN_FREE_BYTES = 256 * MIB  # less free space than this and nothing is written that is not a delete
FREE_LOOK_MS = 200  # how often a writing shard looks
CONTROL_BYTES = 4 * KIB  # more than a topic frame and a ceiling frame take
WAL_FILE_BYTES = 64 * MIB
SECTOR_BYTES = 4_096  # what a disk loses at once, where it loses something
WAL_RESERVE_BYTES = 1 * MIB  # the end of the last WAL file, on a full disk: deletes, and copies they wait for
SEGMENT_MAX_EVENTS = 10_000
SEGMENT_MAX_BYTES = 64 * MIB
SEGMENT_MAX_AGE_MS = 3_600_000
HOT_RETAIN_SEGMENTS = 4
BLOCK_RECORDS = 1_024  # small appends are coalesced into blocks of about this many records ...
BLOCK_BYTES = 128 * KIB  # ... or this many bytes, so that a short read does not fetch megabytes
DISK_SYNC_MS = 250  # the disk class reaches the platter at most this much later
TAIL_ROWS = 200_000  # index rows a shard keeps in the WAL before it moves them into segments
WAL_BACKLOG_BYTES = 512 * MIB  # likewise in bytes: what recovery may have to replay
COPIES_BYTES = 64 * MIB  # routers' copies that are in memory only: more have to wait until these are in segments
COPIES_AGE_MS = 2_000  # a copy is written to a segment about this much later: what a restart has to copy again
FORWARD_RECORDS = 4_096  # what one forward may carry
FORWARD_BYTES = 1 * MIB
CACHE_BYTES = 32 * MIB  # recent and recently read batches, per shard
FETCH_BYTES = 4 * MIB  # what one request may have fetched from the cold tier at once
COPY_BYTES = 1 * MIB  # a segment is copied there in pieces of this size, with as much time between them
SEQ_RESERVE = 100  # seqs promised ahead on disk, so that none is reused after a crash: at least so many, ...
SEQ_RESERVE_MS = 2_000  # ... and as many as the topic writes in this time
SEQ_RESERVE_QUIET_MS = 5_000  # a promise that is not half used by then is made anew
LOST_SEQS = 100_000  # that a lost part of a log may have given out, if nothing else bounds them
