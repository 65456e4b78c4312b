//! Full volumes. What was accepted is there, whatever was refused around it, and all of it can be
//! removed.

use offshoot_testkit::model::actor::Actor;
use offshoot_testkit::model::{Model, ModelManners};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::{MISSING_FLAGS, comparison, judges};
use offshoot_vfs::{Errno, Error, XattrMode};

use super::*;

/// The size of one write: a write of this size at a multiple of it is done whole or not at all.
const PIECE: usize = 64 << 10;

/// A file as it was accepted.
struct AcceptedXfsFile {
    name: String,
    len: usize,
    attribute: usize,
}

impl AcceptedXfsFile {
    /// Bytes that only this file has.
    fn bytes(&self, len: usize) -> Vec<u8> {
        let seed = self.name.bytes().fold(0, |sum: u64, byte| sum * 31 + u64::from(byte));
        Random::new(seed).bytes(len)
    }
}

/// Whether it was done. The only error that it may give is a lack of space.
#[track_caller]
fn accepted<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(done) => Some(done),
        Err(error) if error.errno() == Errno::NOSPC => None,
        Err(error) => panic!("{error}"),
    }
}

/// Adds a file; `None` when the volume refused a part of it.
fn add(
    opened: &WrittenXfs,
    name: String,
    random: &mut Random,
    made: &mut Vec<AcceptedXfsFile>,
) -> Option<()> {
    let len = [0, 5000, 300_000, 4 << 20][usize::try_from(random.below(4)).unwrap()];
    let file = accepted(opened.files.create(opened.place(&name), &NEW))?;
    made.push(AcceptedXfsFile { name, len: 0, attribute: 0 });
    let made = made.last_mut().unwrap();
    let bytes = made.bytes(usize::try_from(random.below(len + 1)).unwrap());
    for piece in bytes.chunks(PIECE) {
        accepted(opened.files.write(file, made.len as u64, piece, AT))?;
        made.len += piece.len();
    }
    let value = vec![7; usize::try_from(random.below(3000)).unwrap()];
    accepted(opened.files.set_xattr(file, b"user.filling", &value, XattrMode::Set, AT))?;
    made.attribute = value.len();
    Some(())
}

/// Adds files on two threads until the volume refuses one.
fn fill(opened: &WrittenXfs, round: u64, seed: u64) -> Vec<AcceptedXfsFile> {
    let add_all = |thread: u64| {
        let mut random = Random::new(seed ^ round << 32 ^ thread);
        let mut made = Vec::new();
        let mut names = (0..100_000).map(|number| format!("{round}-{thread}-{number}"));
        assert!(names.any(|name| add(opened, name, &mut random, &mut made).is_none()));
        made
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| add_all(1));
        let mut made = add_all(0);
        made.append(&mut other.join().unwrap());
        made
    })
}

fn verify(files: &dyn FileSystem, made: &[AcceptedXfsFile]) {
    for made in made {
        let file = files.lookup(files.root(), made.name.as_bytes()).unwrap();
        let found = content(files, file);
        assert!(found == made.bytes(made.len), "contents of {}", made.name);
        let value = files.xattr(file, b"user.filling").map_or(0, |value| value.len());
        assert_eq!(value, made.attribute, "attribute of {}", made.name);
    }
}

fn remove(opened: &WrittenXfs, made: &[AcceptedXfsFile]) {
    for made in made {
        let removed = opened.files.unlink(opened.place(&made.name), AT);
        removed.unwrap_or_else(|error| panic!("{} stays: {error}", made.name));
    }
}

fn fill_and_empty(options: &str) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disk = made(&judges, 64, options);
    let empty = WrittenXfs::new(&disk).files.statfs().unwrap().available_bytes;
    for round in 0..3 {
        let opened = WrittenXfs::new(&disk);
        let filled = fill(&opened, round, seed);
        let bytes: usize = filled.iter().map(|made| made.len).sum();
        assert!(bytes as u64 > empty / 2, "{bytes} bytes where {empty} were free");
        verify(&*opened.files, &filled);
        let opened = if round == 1 {
            opened.shut_down();
            assert_checks(&disk);
            let reader = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
            verify(&*reader, &filled);
            WrittenXfs::new(&disk)
        } else {
            opened
        };
        remove(&opened, &filled);
        opened.files.sync().unwrap();
        let free = opened.files.statfs().unwrap().available_bytes;
        assert!(free + (2 << 20) > empty, "{free} bytes are free, and {empty} were");
        opened.shut_down();
        assert_checks(&disk);
    }
    drop(disk.mount("", &[]));
}

#[test]
fn what_a_full_volume_accepted_is_there_and_goes() {
    fill_and_empty("--unsupported");
}

#[test]
fn what_a_full_volume_of_small_blocks_accepted_is_there_and_goes() {
    fill_and_empty("--unsupported -b size=1024 -m rmapbt=0,reflink=0");
}

/// Actors work on a full volume. A refused operation has changed nothing, even if it consists of
/// several steps. Removals and commits are never refused.
#[test]
fn actors_on_a_full_volume_do_what_the_model_does() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disk = made(&judges, 64, "--unsupported");
    for round in 0..2 {
        let opened = WrittenXfs::new(&disk);
        let mut filled = fill(&opened, round, seed);
        let model = Model::copy(&*opened.files).unwrap().with_manners(ModelManners::Xfs);
        let (files, all) = (&*opened.files, &model);
        std::thread::scope(|scope| {
            for number in 0..3 {
                let actor = Actor::new(files, all, number, seed ^ round << 32, AT);
                let actor = actor.without_flags(MISSING_FLAGS).where_space_is_short();
                let mut actor = actor;
                scope.spawn(move || actor.act(400));
            }
        });
        let half = filled.split_off(filled.len() / 2);
        let compare = |files: &dyn FileSystem| {
            comparison().run_filesystems(files, &model).assert_same(20);
        };
        compare(&*opened.files);
        opened.shut_down();
        assert_checks(&disk);
        let opened = WrittenXfs::new(&disk);
        compare(&*opened.files);
        remove(&opened, &half);
        opened.shut_down();
    }
    assert_checks(&disk);
}
