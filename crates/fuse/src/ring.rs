//! Requests and answers over io_uring: one system call sends an answer and waits for the next
//! request.
//!
//! ```text
//! system call on CPU n ─> queue n ─> an entry that waits ─> its thread, on CPU n: request, call, answer ─┐
//!                                          └────────────────── commit and fetch ────────────────────────┘
//! ```
//!
//! A queue has entries, and each of them has a thread with an io_uring and a buffer of its own. So
//! a call may take its time: it keeps its own entry, and the other requests of the queue go to the
//! others. All entries are registered when it is mounted, because one that comes later gets nothing
//! of what waits in the queue already: only a commit does. The kernel takes the entry that came
//! back last, so one thread does all the work as long as it can, with warm caches, beside whoever
//! asks; the others cost a stack and memory that nobody has touched. Large pieces of data are
//! another matter: a thread that moved one may run anywhere, so that what is read ahead is read on
//! all CPUs.
//!
//! Not everything comes this way: what is forgotten and what is interrupted comes over `/dev/fuse`,
//! as does the first request.
//!
//! `shared` holds what the kernel and the thread write in turns.

mod shared;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::cpus::{Place, all};
use crate::dispatch::{Answer, Dispatcher};
use crate::output::Output;
use crate::request::Request;
use crate::wire::{InHeader, OutHeader, RingHeader};
use shared::{Entry, is_gone};

/// What is put aside where request and answer are in each other's way: all requests but those with
/// data fit, and all answers but those with data.
const ASIDE_BYTES: usize = 8192;

/// From this size on a piece of data is large.
const LARGE_BYTES: usize = 64 << 10;

/// What came of waiting for a request.
pub(crate) enum Received {
    /// It is there.
    Request,
    /// The kernel does not take the entry, and sends what it has over `/dev/fuse`, or to other
    /// entries.
    Refused(Errno),
    /// The mount is gone.
    Gone,
}

/// A thread's way to the kernel over io_uring.
pub(crate) struct RingChannel {
    place: Place,
    entry: Entry,
    aside: Box<[u8]>,
}

impl RingChannel {
    /// Gets what an entry of `queue` takes of the host. Its thread may run where this one may.
    pub(crate) fn new(device: Arc<OwnedFd>, queue: u16) -> io::Result<Self> {
        let entry = Entry::new(device, queue)?;
        let aside = vec![0; ASIDE_BYTES].into_boxed_slice();
        Ok(Self { place: Place::new(queue, all()), entry, aside })
    }

    /// Registers the entry, which this thread serves from now on.
    pub(crate) fn join(&mut self) -> io::Result<()> {
        self.place.bind(true);
        self.entry.register()
    }

    /// Waits for the next request and takes it.
    pub(crate) fn receive(&mut self) -> io::Result<Received> {
        let Err(error) = self.entry.wait() else { return Ok(Received::Request) };
        match Errno::from_io_error(&error) {
            Some(errno) if is_gone(errno) => Ok(Received::Gone),
            // FUSE itself says these, and gives up io_uring then. All others come from before it,
            // and it would wait on.
            Some(errno @ (Errno::INVAL | Errno::NOMEM | Errno::FAULT | Errno::OPNOTSUPP))
                if self.entry.is_refused() =>
            {
                Ok(Received::Refused(errno))
            }
            _ => Err(error),
        }
    }

    /// Has the request answered that was taken, and sends the answer with the next wait.
    pub(crate) fn answer(&mut self, dispatcher: &Dispatcher) -> io::Result<()> {
        let (header, payload) = self.entry.buffers();
        let id = header.commit_id;
        let asked = usize::try_from(header.payload_sz).unwrap_or(usize::MAX);
        let (answer, len) = answer(dispatcher, header, payload, &mut self.aside);
        put_header(header, answer, len);
        self.entry.commit(id)?;
        self.place.bind(asked.max(len) < LARGE_BYTES);
        Ok(())
    }
}

/// Has the request answered that `header` and `payload` hold; how long the payload is that takes
/// its place.
fn answer(
    dispatcher: &Dispatcher,
    header: &RingHeader,
    payload: &mut [u8],
    aside: &mut [u8],
) -> (Answer, usize) {
    let malformed = (Answer::Failed(Errno::INVAL), 0);
    let asked = usize::try_from(header.payload_sz).unwrap_or(usize::MAX);
    if asked <= aside.len() {
        aside[..asked].copy_from_slice(&payload[..asked]);
        let Ok(request) = Request::of_parts(&header.in_out, &header.op_in, &aside[..asked]) else {
            return malformed;
        };
        let mut out = Output::new(payload);
        let answer = dispatcher.answer(&request, &mut out);
        return (answer, out.bytes().len());
    }
    let Some(data) = payload.get(..asked) else { return malformed };
    let Ok(request) = Request::of_parts(&header.in_out, &header.op_in, data) else {
        return malformed;
    };
    let mut out = Output::new(aside);
    let answer = dispatcher.answer(&request, &mut out);
    let len = out.bytes().len();
    payload[..len].copy_from_slice(&aside[..len]);
    (answer, len)
}

/// Says what becomes of the request whose header stands there.
fn put_header(header: &mut RingHeader, answer: Answer, len: usize) {
    let (error, len) = match answer {
        Answer::Sent => (0, len),
        Answer::Failed(errno) => (-errno.raw_os_error(), 0),
        // Nobody waits for it, but the entry is to be had back.
        Answer::Silence => (0, 0),
    };
    let (asked, _) = InHeader::read_from_prefix(&header.in_out).expect("128 bytes are enough");
    header.payload_sz = u32::try_from(len).expect("1 MiB");
    let len = u32::try_from(size_of::<OutHeader>() + len).expect("little over 1 MiB");
    let out = OutHeader { len, error, unique: asked.unique };
    header.in_out[..size_of::<OutHeader>()].copy_from_slice(out.as_bytes());
}
