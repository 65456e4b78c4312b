//! What the kernel and a thread write in turns: the memory of an entry, and the io_uring by which
//! it changes hands.
//!
//! ```text
//!            register, commit
//!   ours  ─────────────────────>  lent      the kernel reads the answer and writes the next request
//!         <─────────────────────
//!              wait: a completion
//! ```
//!
//! The kernel is told once, when an entry is registered, where its memory is, and uses these
//! addresses as long as there is the entry. What lies behind them is the kernel's while it is lent.
//! No type of the language says that, so this is the module that is unsafe. What it stands on:
//!
//! 1. From registration on the memory stays where it is: it is known by raw pointers, which came
//!    from boxes, and nobody can put another piece in its place.
//! 2. The kernel gives one completion for each submission, and writes nothing from then to the next
//!    one. There is one submission at a time, and nobody looks at what is lent.
//! 3. It is freed when the kernel does not know it: before it is registered, after that was
//!    refused, or when the mount is gone. Who drops an entry otherwise, as only a panic or an error
//!    does, leaves it to the kernel.
//!
//! Whatever numbers the kernel writes, they are only bytes here: who decodes them checks them.

#![expect(unsafe_code, reason = "pointers are given to io_uring, as the essay says")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::io::Errno;
use zerocopy::{FromZeros, IntoBytes};

use crate::dispatch::MAX_BYTES;
use crate::wire::{RingCommand, RingHeader, ring_command};

/// How often the kernel is asked again that has no memory or no time, and how long it is given
/// between.
const TRIES: u32 = 1000;
const PAUSE: Duration = Duration::from_millis(10);

/// How long a thread looks for the next request before it sleeps, if the last one came as soon.
///
/// Waking a processor that sleeps takes longer than most calls, on a virtual machine above all, and
/// who waits for an answer is woken on one that sleeps, if there is any. A thread that looks keeps
/// its own awake, and lets everybody else go first there. With one program that makes small files,
/// on two processors, every call woke one: a fourth of its time.
const LOOK: Duration = Duration::from_micros(50);

/// A piece of memory, as system calls take it (`struct iovec`).
#[repr(C)]
struct Piece {
    start: *mut u8,
    len: usize,
}

/// Where a request lies, and then its answer.
struct Memory {
    header: *mut RingHeader,
    payload: *mut [u8],
    /// Where the two are.
    pieces: *mut [Piece; 2],
}

impl Memory {
    /// Memory that nobody has touched yet.
    fn new() -> Self {
        let payload = vec![0; usize::try_from(MAX_BYTES).expect("1 MiB")].into_boxed_slice();
        let header = Box::into_raw(Box::new(RingHeader::new_zeroed()));
        let payload = Box::into_raw(payload);
        let pieces = [
            Piece { start: header.cast(), len: size_of::<RingHeader>() },
            Piece { start: payload.cast(), len: payload.len() },
        ];
        Self { header, payload, pieces: Box::into_raw(Box::new(pieces)) }
    }
}

/// An io_uring with one entry of a queue.
pub(super) struct Entry {
    ring: IoUring<Entry128, cqueue::Entry>,
    device: Arc<OwnedFd>,
    queue: u16,
    memory: Memory,
    /// The memory is the kernel's.
    is_lent: bool,
    /// The kernel knows where the memory is.
    is_known: bool,
    /// What it was asked last: which command, and the answer of which request it has to take.
    asked: (u32, u64),
    /// The last request came soon.
    is_busy: bool,
}

// SAFETY: the pointers are to what the entry owns, and nobody uses them but it and the kernel.
unsafe impl Send for Entry {}

impl Entry {
    /// One that is not registered yet, for this queue of the mount of `device`.
    pub(super) fn new(device: Arc<OwnedFd>, queue: u16) -> io::Result<Self> {
        // The thread that uses it is the only one that does, and has the kernel's part of the work
        // done while it waits.
        let ring = IoUring::builder()
            .dontfork()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(1)?;
        // What a filter of system calls refuses could be had through a ring, so it does nothing
        // else from the moment that it does anything.
        let command = opcode::UringCmd80::CODE;
        ring.submitter().register_restrictions(&mut [Restriction::sqe_op(command)])?;
        let (memory, asked) = (Memory::new(), (ring_command::REGISTER, 0));
        let (is_lent, is_known, is_busy) = (false, false, false);
        Ok(Self { ring, device, queue, memory, is_lent, is_known, asked, is_busy })
    }

    /// Registers it. It has no request yet, and from now on this thread is the only one to use it.
    pub(super) fn register(&mut self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()?;
        self.lend()
    }

    /// Has the answer taken that is in the buffers, and asks for the next request.
    pub(super) fn commit(&mut self, id: u64) -> io::Result<()> {
        self.asked = (ring_command::COMMIT_AND_FETCH, id);
        self.lend()
    }

    /// The kernel answered that it does not take this entry.
    pub(super) fn is_refused(&self) -> bool {
        self.asked.0 == ring_command::REGISTER && !self.is_lent && !self.is_known
    }

    /// The header and the payload of the request that was waited for. There is one unless the last
    /// wait failed, or there was none.
    pub(super) fn buffers(&mut self) -> (&mut RingHeader, &mut [u8]) {
        assert!(!self.is_lent, "who looks at a request has waited for it");
        // SAFETY: both came from boxes that only drop frees, the kernel writes to them only while
        // they are lent, and as long as these two are there nobody else gets them from this entry,
        // nor lends them.
        unsafe { (&mut *self.memory.header, &mut *self.memory.payload) }
    }

    /// Asks the kernel what `asked` says and lends it the memory, with the next wait.
    fn lend(&mut self) -> io::Result<()> {
        assert!(!self.is_lent, "there is one submission at a time");
        let (what, commit_id) = self.asked;
        let command = RingCommand { commit_id, qid: self.queue, ..RingCommand::default() };
        let mut bytes = [0; 80];
        bytes[..size_of::<RingCommand>()].copy_from_slice(command.as_bytes());
        let pieces = self.memory.pieces.expose_provenance() as u64;
        self.memory.header.expose_provenance();
        self.memory.payload.cast::<u8>().expose_provenance();
        let mut entry = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), what)
            .cmd(bytes)
            .addr(Some(pieces))
            .build();
        set_len(&mut entry, 2);
        (self.is_lent, self.is_known) = (true, true);
        // SAFETY: the pieces, and what they point to, stay where they are as long as the kernel
        // knows them.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)
    }

    /// Waits for a request. What the kernel cannot do now it is asked again.
    ///
    /// # Errors
    /// What the kernel says instead.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        for _ in 0..TRIES {
            match self.wait_once() {
                Err(Errno::AGAIN | Errno::BUSY | Errno::INTR) => thread::sleep(PAUSE),
                result => return Ok(result?),
            }
            if !self.is_lent {
                self.lend()?;
            }
        }
        Err(Errno::BUSY.into())
    }

    fn wait_once(&mut self) -> Result<(), Errno> {
        let begun = Instant::now();
        loop {
            if let Some(completion) = self.ring.completion().next() {
                assert!(self.is_lent, "a completion comes of a submission");
                self.is_lent = false;
                self.is_busy = begun.elapsed() < LOOK;
                let error = completion.result().checked_neg().unwrap_or(i32::MAX);
                if error <= 0 {
                    return Ok(());
                }
                let error = Errno::from_raw_os_error(error);
                if self.asked.0 == ring_command::REGISTER || is_gone(error) {
                    self.is_known = false;
                }
                return Err(error);
            }
            if self.is_busy {
                self.enter(0)?;
                while !self.has_come() && begun.elapsed() < LOOK {
                    thread::yield_now();
                }
            }
            if self.ring.completion().is_empty() {
                self.enter(1)?;
            }
        }
    }

    /// Whether a completion is there, or the kernel has work for this thread that leads to one.
    fn has_come(&mut self) -> bool {
        !self.ring.completion().is_empty() || self.ring.submission().taskrun()
    }

    /// Hands in what was submitted, and waits for so many completions, unless a signal comes first.
    fn enter(&mut self, completions: usize) -> Result<(), Errno> {
        match self.ring.submit_and_wait(completions) {
            Err(error) if error.raw_os_error() != Some(Errno::INTR.raw_os_error()) => {
                Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if !self.is_known {
            let Memory { header, payload, pieces } = self.memory;
            // SAFETY: the three came from boxes, nobody else frees them, and the kernel does not
            // know them.
            unsafe { drop((Box::from_raw(header), Box::from_raw(payload), Box::from_raw(pieces))) };
        }
    }
}

/// Whether the kernel says that the mount is gone, and its entries with it.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOTCONN | Errno::CONNABORTED | Errno::NODEV)
}

/// Says how many pieces there are: the builder of such an entry does not.
fn set_len(entry: &mut Entry128, len: u32) {
    /// Where the length stands in an entry (`struct io_uring_sqe`).
    const LEN: usize = 24;
    const { assert!(size_of::<Entry128>() == 128) };
    // SAFETY: an entry is 128 bytes of plain numbers, in the layout of the kernel.
    unsafe { std::ptr::from_mut(entry).cast::<[u8; 4]>().add(LEN / 4).write(len.to_ne_bytes()) };
}
