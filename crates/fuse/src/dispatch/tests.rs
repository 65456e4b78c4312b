//! Requests that the model answers, without a kernel.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use offshoot_testkit::model::Model;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::Timestamp;
use zerocopy::IntoBytes;

use super::*;
use crate::ioctls::{Ioctl, Ioctls};
use crate::wire::{SetattrValid, WRITE_KILL_SUIDGID, notice};

const NOW: Timestamp = Timestamp { secs: 1_000_000_000, nanos: 5 };

fn dispatcher() -> Dispatcher {
    with_options(ServeOptions::default())
}

/// A dispatcher whose notifications go to `/dev/null`.
fn with_options(options: ServeOptions) -> Dispatcher {
    let device = File::options().write(true).open("/dev/null").expect("every host has it");
    on_device(device.into(), options)
}

fn on_device(device: OwnedFd, options: ServeOptions) -> Dispatcher {
    Dispatcher::new(Box::new(Model::made_at(NOW)), options, Arc::new(device))
}

/// The bytes of a request.
fn request(op: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(40 + body.len()).expect("short");
    let mut bytes = [len, op].as_bytes().to_vec();
    bytes.extend([1, node].as_bytes());
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

/// The outcome and the bytes of an answer of `dispatcher`.
fn answer(dispatcher: &Dispatcher, op: u32, node: u64, body: &[u8]) -> (Answer, Vec<u8>) {
    let bytes = request(op, node, body);
    let mut buffer = vec![0; 70_000];
    let mut out = AnswerBody::new(&mut buffer);
    let request = Request::decode(&bytes).expect("a header");
    let answer = dispatcher.answer(&request, &mut out);
    (answer, out.bytes().to_vec())
}

#[track_caller]
fn sent(dispatcher: &Dispatcher, op: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let (answer, bytes) = answer(dispatcher, op, node, body);
    assert_eq!(answer, Answer::Sent);
    bytes
}

/// The node in an entry.
fn node_in(entry: &[u8]) -> u64 {
    u64::from_ne_bytes(*entry.first_chunk().expect("an entry"))
}

/// Makes a file with this name in the root.
fn create(dispatcher: &Dispatcher, name: &[u8]) -> u64 {
    let body = [[0_u32, 0o100_644, 0o022, 0].as_bytes(), name, b"\0"].concat();
    node_in(&sent(dispatcher, opcode::CREATE, 1, &body))
}

/// An unlinked file stays until the kernel has forgotten all of its lookups.
#[test]
fn unlinked_files_stay_until_they_are_forgotten() {
    let dispatcher = dispatcher();
    let node = create(&dispatcher, b"file");
    assert_eq!(node_in(&sent(&dispatcher, opcode::LOOKUP, 1, b"file\0")), node);
    sent(&dispatcher, opcode::UNLINK, 1, b"file\0");
    assert_eq!(node_in(&sent(&dispatcher, opcode::LOOKUP, 1, b"file\0")), 0);
    let getattr = || answer(&dispatcher, opcode::GETATTR, node, &[0; 16]).0;
    for (count, left) in [(1_u64, Answer::Sent), (1, Answer::Failed(Errno::NOENT))] {
        let forget = [&1_u32.to_ne_bytes()[..], &[0; 4], [node, count].as_bytes()].concat();
        assert_eq!(getattr(), Answer::Sent);
        assert_eq!(answer(&dispatcher, opcode::BATCH_FORGET, 0, &forget).0, Answer::Silence);
        assert_eq!(getattr(), left);
    }
}

/// The lines that a subscriber wrote.
#[derive(Clone, Default)]
struct RequestEvents(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for RequestEvents {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Each request has an event when it begins and one when it ends.
#[test]
fn requests_have_events() {
    let lines = RequestEvents::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let dispatcher = dispatcher();
        sent(&dispatcher, opcode::GETATTR, 1, &[0; 16]);
        // A test without a subscriber may have come there first, and then `tracing` remembers that
        // no subscriber takes these events.
        tracing::callsite::rebuild_interest_cache();
        lines.0.lock().expect("no panic").clear();
        sent(&dispatcher, opcode::GETATTR, 1, &[0; 16]);
        answer(&dispatcher, opcode::READLINK, 9, &[]);
    });
    let lines = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("text");
    let lines: Vec<_> = lines.lines().collect();
    let expected = [
        "a request begins opcode=\"GETATTR\" node=1 unique=1 pid=0 uid=0",
        "the request ends opcode=\"GETATTR\" node=1 unique=1 answer=Sent us=",
        "a request begins opcode=\"READLINK\" node=9 unique=1 pid=0 uid=0",
        "the request ends opcode=\"READLINK\" node=9 unique=1 answer=Failed(",
    ];
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(&format!("TRACE fuse::request: {expected}")), "{line}");
    }
}

/// A new file has no capabilities until a request sets some.
#[test]
fn capabilities_of_new_files_are_found_when_they_are_set() {
    let dispatcher = dispatcher();
    let node = create(&dispatcher, b"file");
    let name = b"security.capability\0";
    let get = [[64_u32, 0].as_bytes(), name].concat();
    let missing = Answer::Failed(Errno::NODATA);
    assert_eq!(answer(&dispatcher, opcode::GETXATTR, node, &get).0, missing);
    let set = [[5_u32, 0].as_bytes(), name, b"value"].concat();
    sent(&dispatcher, opcode::SETXATTR, node, &set);
    assert_eq!(sent(&dispatcher, opcode::GETXATTR, node, &get), b"value");
    sent(&dispatcher, opcode::REMOVEXATTR, node, name);
    assert_eq!(answer(&dispatcher, opcode::GETXATTR, node, &get).0, missing);
}

/// A handle of the root was made when it was not the root, if it names another node. A lookup that
/// finds no attributes does not count.
#[test]
fn handles_that_lead_nowhere_are_stale() {
    let dispatcher = dispatcher();
    let node = create(&dispatcher, b"file");
    assert_eq!(node_in(&sent(&dispatcher, opcode::LOOKUP, node, b".\0")), node);
    let stale = Answer::Failed(Errno::STALE);
    let root = dispatcher.fs.root();
    let number = dispatcher.nodes.numbers.number(root);
    assert_ne!(number, 1);
    assert_eq!(answer(&dispatcher, opcode::LOOKUP, number, b".\0").0, stale);
    let missing = FileId { ino: 1 << 30, ..root };
    let number = dispatcher.nodes.numbers.number(missing);
    assert_eq!(answer(&dispatcher, opcode::LOOKUP, number, b".\0").0, stale);
    assert!(!dispatcher.nodes.knows(missing));
}

/// After a shutdown a program can still unmount, and learns whether everything was stored.
#[test]
fn a_shutdown_leaves_what_unmounting_needs() {
    let dispatcher = dispatcher();
    dispatcher.is_shut_down.store(true, Ordering::SeqCst);
    let failed = Answer::Failed(Errno::IO);
    for (is_stored, expected) in [(false, failed), (true, Answer::Sent)] {
        dispatcher.is_stored.store(is_stored, Ordering::SeqCst);
        sent(&dispatcher, opcode::GETATTR, 1, &[0; 16]);
        sent(&dispatcher, opcode::OPENDIR, 1, &[0; 8]);
        assert_eq!(answer(&dispatcher, opcode::FSYNCDIR, 1, &[0; 16]).0, expected);
        assert_eq!(answer(&dispatcher, opcode::SYNCFS, 1, &[0; 8]).0, expected);
        assert_eq!(answer(&dispatcher, opcode::DESTROY, 1, &[]).0, expected);
        assert_eq!(dispatcher.end().is_ok(), is_stored);
        assert_eq!(answer(&dispatcher, opcode::LOOKUP, 1, b"file\0").0, failed);
    }
}

/// The end of the session releases files that the kernel never forgot.
#[test]
fn the_end_lets_go_of_everything() {
    let dispatcher = dispatcher();
    let node = create(&dispatcher, b"file");
    sent(&dispatcher, opcode::UNLINK, 1, b"file\0");
    dispatcher.end().expect("the model never fails");
    assert_eq!(
        answer(&dispatcher, opcode::GETATTR, node, &[0; 16]).0,
        Answer::Failed(Errno::NOENT)
    );
}

#[test]
fn versions_are_agreed_on() {
    let dispatcher = dispatcher();
    let init = |major: u32, minor: u32, flags: u32, more: &[u8]| {
        let body = [[major, minor, 1 << 17, flags].as_bytes(), more].concat();
        answer(&dispatcher, opcode::INIT, 0, &body)
    };
    let protocol = Answer::Failed(Errno::PROTO);
    assert_eq!(init(7, 30, 0, &[]).0, protocol);
    assert_eq!(init(6, 40, 0, &[]).0, protocol);
    assert_eq!(init(7, 40, 1 << 30, &[]).0, Answer::Failed(Errno::INVAL), "it is cut off");
    let (newer, agreed) = init(8, 0, 0, &[]);
    assert_eq!((newer, &agreed[..4]), (Answer::Sent, &7_u32.to_ne_bytes()[..]));
    let (same, agreed) = init(7, 45, u32::MAX, &[0xff; 48]);
    assert_eq!((same, agreed.len()), (Answer::Sent, 64));
    let flags = u32::from_ne_bytes(*agreed[12..].first_chunk().expect("flags"));
    assert_eq!(
        flags & (1 << 16),
        0,
        "the kernel must not gather writes: it sends whole pages, which no file takes that is only appended to"
    );
    assert_ne!(flags & (1 << 20), 0, "access control lists are asked for");
    // The answer has no feature that the kernel does not offer.
    assert_eq!(init(7, 40, 0, &[]).1[12..16], [0; 4]);
}

/// A listing has each entry once and whole, however little the kernel asks for at a time.
#[test]
fn listings_come_in_pieces() {
    let dispatcher = dispatcher();
    let mut names: Vec<_> = (0..20).map(|n| vec![b'a'; n * 12 + 1]).collect();
    for name in &names {
        create(&dispatcher, name);
    }
    names.extend([b".".to_vec(), b"..".to_vec()]);
    names.sort();
    for (op, head) in [(opcode::READDIR, 0), (opcode::READDIRPLUS, 128)] {
        for size in [head + 24 + 256, 1000, 60_000] {
            let (mut shown, mut place) = (Vec::new(), 0_u64);
            loop {
                let size_word = u32::try_from(size).expect("little");
                let body = [[0, place].as_bytes(), size_word.as_bytes(), &[0; 20]].concat();
                let listed = sent(&dispatcher, op, 1, &body);
                assert!(listed.len() <= size);
                let mut rest = &listed[..];
                while !rest.is_empty() {
                    let entry = &rest[head..];
                    place = u64::from_ne_bytes(*entry[8..].first_chunk().expect("a place"));
                    let len = u32::from_ne_bytes(*entry[16..].first_chunk().expect("a length"));
                    let len = usize::try_from(len).expect("little");
                    shown.push(entry[24..][..len].to_vec());
                    rest = &rest[head + (24 + len).next_multiple_of(8)..];
                }
                if listed.is_empty() {
                    break;
                }
            }
            shown.sort();
            assert_eq!(shown, names, "{op} by {size}");
        }
    }
}

/// A write by a program that may not keep the set-id bits clears them. The kernel is notified
/// before the write is answered.
#[test]
fn set_id_bits_go_with_a_write() {
    let (mut told, device) = std::io::pipe().expect("a pipe");
    let dispatcher = on_device(device.into(), ServeOptions::default());
    let node = create(&dispatcher, b"program");
    let valid = [SetattrValid::MODE.bits(), 0];
    let set = [valid.as_bytes(), &[0; 60], 0o6755_u32.as_bytes(), &[0; 16]];
    sent(&dispatcher, opcode::SETATTR, node, &set.concat());
    let permissions = || {
        let shown = sent(&dispatcher, opcode::GETATTR, node, &[0; 16]);
        u32::from_ne_bytes(*shown[16 + 60..].first_chunk().expect("attributes")) & 0o7777
    };
    for (flags, expected) in [(0, 0o6755), (WRITE_KILL_SUIDGID, 0o755)] {
        let body = [[0, 0, 0, 0, 1, flags].as_bytes(), &[0; 16], b"x"].concat();
        sent(&dispatcher, opcode::WRITE, node, &body);
        assert_eq!(permissions(), expected, "after a write with the flags {flags}");
    }
    let mut said = [0; 100];
    let len = told.read(&mut said).expect("something was told");
    assert_eq!((len, said[4..8].as_bytes()), (40, notice::INVAL_INODE.as_bytes()));
    assert_eq!(said[16..24], node.to_ne_bytes());
}

/// Answers ioctl 1 with its data, twice, and remembers which directories were closed.
#[derive(Default)]
struct TwiceIoctl {
    closed: Mutex<Vec<u64>>,
}

impl Ioctls for TwiceIoctl {
    fn answer(&self, ioctl: &Ioctl<'_>) -> Result<Vec<u8>> {
        assert_eq!((ioctl.directory, ioctl.uid, ioctl.gid), (77, 0, 0));
        match ioctl.command {
            1 => Ok([ioctl.data, ioctl.data].concat()),
            other => Err(Error::posix(Errno::NOTTY, other.to_string())),
        }
    }

    fn closed(&self, directory: u64) {
        self.closed.lock().expect("no thread panicked").push(directory);
    }
}

/// An unknown ioctl on a directory is passed on. An answer that is longer than the room for it
/// fails.
#[test]
fn ioctls_are_passed_on() {
    const DIRECTORY: u32 = 1 << 4;
    let others = Arc::new(TwiceIoctl::default());
    let options = ServeOptions { ioctls: Some(others.clone()), ..ServeOptions::default() };
    let passing = with_options(options);
    let ask = |dispatcher: &Dispatcher, flags: u32, command: u32, sizes: [u32; 2], data: &[u8]| {
        let numbers = [flags, command, 0, 0, sizes[0], sizes[1]];
        let head = [77_u64.as_bytes(), numbers.as_bytes()].concat();
        answer(dispatcher, opcode::IOCTL, 1, &[&head, data].concat())
    };
    let (told, bytes) = ask(&passing, DIRECTORY, 1, [3, 6], b"abc");
    assert_eq!((told, &bytes[..16], &bytes[16..]), (Answer::Sent, &[0; 16][..], &b"abcabc"[..]));
    let failed = |errno| Answer::Failed(errno);
    assert_eq!(ask(&passing, DIRECTORY, 1, [3, 5], b"abc").0, failed(Errno::RANGE));
    assert_eq!(ask(&passing, DIRECTORY, 1, [4, 8], b"abc").0, failed(Errno::INVAL));
    assert_eq!(ask(&passing, DIRECTORY, 1, [u32::MAX; 2], b"abc").0, failed(Errno::INVAL));
    assert_eq!(ask(&passing, DIRECTORY, 2, [3, 6], b"abc").0, failed(Errno::NOTTY));
    assert_eq!(ask(&passing, 0, 1, [3, 6], b"abc").0, failed(Errno::NOTTY), "of a file");
    assert_eq!(ask(&dispatcher(), DIRECTORY, 1, [3, 6], b"abc").0, failed(Errno::NOTTY));
    let release = [[5_u64].as_bytes(), &[0; 16]].concat();
    sent(&passing, opcode::RELEASEDIR, 1, &release);
    assert_eq!(*others.closed.lock().expect("no thread panicked"), [5]);
}

/// Random requests all get answers, and a valid request still works after them.
#[test]
fn hostile_requests() {
    let mut random = Random::new(seed_of_run());
    let dispatcher = dispatcher();
    let file = create(&dispatcher, b"file");
    for _ in 0..200_000 {
        let op = u32::try_from(random.below(60)).expect("little");
        let node = [0, 1, file, file + 1, random.number()][index(&mut random, 5)];
        let body = hostile_body(&mut random, file);
        let (answer, bytes) = answer(&dispatcher, op, node, &body);
        assert_eq!(answer == Answer::Silence, is_silent(op));
        assert!(bytes.len() <= 70_000);
    }
    create(&dispatcher, b"a name that is not random");
}

fn index(random: &mut Random, bound: u64) -> usize {
    usize::try_from(random.below(bound)).expect("little")
}

/// A random body: numbers like those in fixed parts, then names, data or nothing, perhaps cut off.
fn hostile_body(random: &mut Random, file: u64) -> Vec<u8> {
    let mut body = Vec::new();
    for _ in 0..random.below(12) {
        // None is a size that the model would work through piece by piece: 2^32 and more fail at
        // once.
        let numbers = [0, 1, 1 << 32, file, random.below(5000), u64::MAX - random.below(9)];
        body.extend(numbers[index(random, 6)].to_ne_bytes());
    }
    for _ in 0..random.below(3) {
        let names = [&b"file\0"[..], b"a\0", b"..\0", b"user.a\0", b"\0", b"no end", b"a/b\0"];
        body.extend(names[index(random, 7)]);
    }
    if random.below(4) == 0 {
        let len = index(random, 5000);
        body.extend(random.bytes(len));
    }
    if random.below(3) == 0 {
        body.truncate(index(random, body.len() as u64 + 1));
    }
    body
}
