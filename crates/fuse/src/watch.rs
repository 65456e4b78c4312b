//! Events about requests: each one at its beginning and its end, and a warning about one that
//! lasts long, while it lasts.
//!
//! Requests are noted only while a `tracing` subscriber takes warnings of this crate. The first
//! request that is noted starts a thread, which looks at them once a second.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use offshoot_kit::shared::Padded;
use parking_lot::Mutex;
use tracing::{Level, enabled, trace, warn};

use crate::dispatch::Answer;
use crate::wire::{InHeader, opcode};

/// The threads of a mount and its transport.
pub(crate) const MOUNT: &str = "fuse::mount";
/// Requests.
pub(crate) const REQUEST: &str = "fuse::request";

/// The targets of all `tracing` events of this crate.
pub const EVENT_TARGETS: &[&str] = &[MOUNT, REQUEST];

/// A request that takes this long is warned about, and again after twice the time.
const LONG: Duration = Duration::from_secs(10);

/// How often the thread looks.
const TURN: Duration = Duration::from_secs(1);

/// The number of shards.
const SHARDS: usize = 16;

/// A request that is not answered yet.
#[derive(Clone, Copy)]
struct Unanswered {
    opcode: u32,
    node: u64,
    pid: u32,
    since: Instant,
    /// The time after which it is warned about.
    patience: Duration,
}

/// The requests that are not answered yet, by their number.
#[derive(Default)]
pub(crate) struct RequestWatch {
    shards: [WatchShard; SHARDS],
    thread: OnceLock<()>,
}

/// Some of the requests.
type WatchShard = Padded<Mutex<HashMap<u64, Unanswered, RandomState>>>;

impl RequestWatch {
    /// The shard of a request. The kernel counts requests in steps of two.
    fn shard(&self, unique: u64) -> &Mutex<HashMap<u64, Unanswered, RandomState>> {
        let shard = usize::try_from(unique / 2 % SHARDS as u64).expect("below 16");
        &self.shards[shard].0
    }

    /// Notes that a request begins, if events are recorded.
    pub(crate) fn begin(self: &Arc<Self>, header: &InHeader) -> Option<u64> {
        if !enabled!(target: REQUEST, Level::WARN) {
            return None;
        }
        let &InHeader { opcode, unique, nodeid: node, pid, uid, .. } = header;
        trace!(target: REQUEST, opcode = name(opcode), node, unique, pid, uid, "a request begins");
        let since = Instant::now();
        let request = Unanswered { opcode, node, pid, since, patience: LONG };
        self.shard(unique).lock().insert(unique, request);
        self.thread.get_or_init(|| {
            let watch = Arc::downgrade(self);
            let started =
                thread::Builder::new().name("watch".to_owned()).spawn(move || run(&watch));
            if let Err(error) = started {
                warn!(target: REQUEST, %error, "long requests are not noticed");
            }
        });
        Some(unique)
    }

    /// Notes that the request is about to be answered.
    pub(crate) fn end(&self, unique: u64, answer: Answer) {
        let Some(request) = self.shard(unique).lock().remove(&unique) else { return };
        let Unanswered { opcode, node, since, patience, .. } = request;
        let (opcode, us) = (name(opcode), u64::try_from(since.elapsed().as_micros()).ok());
        trace!(target: REQUEST, opcode, node, unique, ?answer, us, "the request ends");
        if patience > LONG {
            warn!(target: REQUEST, opcode, node, unique, ?answer, us, "a long request has ended");
        }
    }

    /// The requests to warn about at `now`, with their numbers.
    fn due(&self, now: Instant) -> Vec<(u64, Unanswered)> {
        let mut due = Vec::new();
        for shard in &self.shards {
            for (&unique, request) in &mut *shard.0.lock() {
                if now.duration_since(request.since) >= request.patience {
                    request.patience *= 2;
                    due.push((unique, *request));
                }
            }
        }
        due
    }
}

/// Warns about long requests until the mount has ended.
fn run(watch: &Weak<RequestWatch>) {
    loop {
        thread::sleep(TURN);
        let Some(watch) = watch.upgrade() else { return };
        for (unique, request) in watch.due(Instant::now()) {
            let Unanswered { opcode, node, pid, since, .. } = request;
            let (opcode, seconds) = (name(opcode), since.elapsed().as_secs());
            warn!(target: REQUEST, opcode, node, unique, pid, seconds, "a request takes long");
        }
    }
}

/// The name of an opcode of the protocol.
fn name(op: u32) -> &'static str {
    opcode::name(op).unwrap_or("unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is told of when it is late, and again after twice the time, whatever its shard is.
    #[test]
    fn a_request_that_lasts_is_due_again_and_again() {
        let (watch, since) = (RequestWatch::default(), Instant::now());
        let request = Unanswered { opcode: opcode::FSYNC, node: 7, pid: 1, since, patience: LONG };
        for unique in [4, 6] {
            watch.shard(unique).lock().insert(unique, request);
        }
        let due = |seconds| watch.due(since + Duration::from_secs(seconds)).len();
        assert_eq!([0, 9, 10, 11, 19, 20, 39, 40].map(due), [0, 0, 2, 0, 0, 2, 0, 2]);
        watch.end(4, Answer::Sent);
        watch.end(6, Answer::Sent);
        assert_eq!(due(1000), 0);
    }

    #[test]
    fn opcodes_have_names() {
        assert_eq!([15, 20, 52, 99].map(name), ["READ", "FSYNC", "STATX", "unknown"]);
    }
}
