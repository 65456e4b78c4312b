//! Requests and answers over io_uring: one system call sends an answer and waits for the next
//! request.
//!
//! ```text
//! system call on CPU n ─> queue n ─> an entry that waits ─> its thread, on CPU n: request, call, answer ─┐
//!                                          └────────────────── commit and fetch ────────────────────────┘
//! ```
//!
//! A queue has entries. Each entry has a thread with an io_uring and a buffer of its own. So a call
//! may take its time: it keeps its own entry, and the other entries take the other requests of the
//! queue. All entries are registered at the mount. An entry that registers later gets none of the
//! requests that wait in the queue already; the kernel hands these out only at a commit. The kernel
//! takes the entry that came back last. So one thread does all the work as long as it can, with
//! warm caches, on the CPU of the program that asks. The other entries cost a stack and untouched
//! memory. A thread that moved a large piece of data may run on any CPU, so that read-ahead runs on
//! all CPUs.
//!
//! FORGET, INTERRUPT and the first request come over `/dev/fuse` all the same.
//!
//! `shared` holds the memory that the kernel and the thread write in turns.

mod shared;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::cpus::{QueueCpus, all};
use crate::dispatch::{Answer, Dispatcher, LARGE_BYTES};
use crate::output::AnswerBody;
use crate::request::Request;
use crate::wire::{InHeader, OutHeader, RingHeader};
use shared::{RingEntry, is_gone};

/// Request and answer share one payload buffer, so one of them is copied to a buffer aside. All
/// requests but those with data fit into it, and all answers but those with data.
const ASIDE_BYTES: usize = 8192;

/// The outcome of a wait for a request.
pub(crate) enum ReceivedRequest {
    /// A request is in the buffers.
    Request,
    /// The kernel refuses the entry, and sends requests to other entries or over `/dev/fuse`.
    Refused(Errno),
    /// The mount is gone.
    Gone,
}

/// A thread's way to the kernel over io_uring.
pub(crate) struct RingChannel {
    place: QueueCpus,
    entry: RingEntry,
    aside: Box<[u8]>,
}

impl RingChannel {
    /// Allocates the io_uring and the memory of an entry of `queue`. The thread that serves it may
    /// run on the CPUs of this thread.
    pub(crate) fn new(device: Arc<OwnedFd>, queue: u16) -> io::Result<Self> {
        let entry = RingEntry::new(device, queue)?;
        let aside = vec![0; ASIDE_BYTES].into_boxed_slice();
        Ok(Self { place: QueueCpus::new(queue, all()), entry, aside })
    }

    /// Registers the entry, which this thread serves from now on.
    pub(crate) fn join(&mut self) -> io::Result<()> {
        self.place.bind(true);
        self.entry.register()
    }

    /// Waits for the next request and takes it.
    pub(crate) fn receive(&mut self) -> io::Result<ReceivedRequest> {
        let Err(error) = self.entry.wait() else { return Ok(ReceivedRequest::Request) };
        match Errno::from_io_error(&error) {
            Some(errno) if is_gone(errno) => Ok(ReceivedRequest::Gone),
            // FUSE itself returns these errors, and then works without the entry. Other errors come
            // from the layers before FUSE, which would still wait for the entry.
            Some(errno @ (Errno::INVAL | Errno::NOMEM | Errno::FAULT | Errno::OPNOTSUPP))
                if self.entry.is_refused() =>
            {
                Ok(ReceivedRequest::Refused(errno))
            }
            _ => Err(error),
        }
    }

    /// Lets `dispatcher` answer the received request. The next wait sends the answer.
    pub(crate) fn answer(&mut self, dispatcher: &Dispatcher) -> io::Result<()> {
        let (header, payload) = self.entry.buffers();
        let id = header.commit_id;
        let asked = usize::try_from(header.payload_sz).unwrap_or(usize::MAX);
        let (answer, len) = answer(dispatcher, header, payload, &mut self.aside);
        put_header(header, answer, len);
        self.entry.commit(id)?;
        // A thread that moved much data may run on any CPU.
        self.place.bind(asked.max(len) < LARGE_BYTES as usize);
        Ok(())
    }
}

/// Lets `dispatcher` answer the request in `header` and `payload`, and puts the answer into
/// `payload`. Returns the length of the answer.
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
        let mut out = AnswerBody::new(payload);
        let answer = dispatcher.answer(&request, &mut out);
        return (answer, out.bytes().len());
    }
    let Some(data) = payload.get(..asked) else { return malformed };
    let Ok(request) = Request::of_parts(&header.in_out, &header.op_in, data) else {
        return malformed;
    };
    let mut out = AnswerBody::new(aside);
    let answer = dispatcher.answer(&request, &mut out);
    let len = out.bytes().len();
    payload[..len].copy_from_slice(&aside[..len]);
    (answer, len)
}

/// Replaces the header of the request by the header of the answer.
fn put_header(header: &mut RingHeader, answer: Answer, len: usize) {
    let (error, len) = match answer {
        Answer::Sent => (0, len),
        Answer::Failed(errno) => (-errno.raw_os_error(), 0),
        // The kernel waits for no answer, but it needs the entry back.
        Answer::Silence => (0, 0),
    };
    let (asked, _) = InHeader::read_from_prefix(&header.in_out).expect("128 bytes are enough");
    header.payload_sz = u32::try_from(len).expect("1 MiB");
    let len = u32::try_from(size_of::<OutHeader>() + len).expect("little over 1 MiB");
    let out = OutHeader { len, error, unique: asked.unique };
    header.in_out[..size_of::<OutHeader>()].copy_from_slice(out.as_bytes());
}
