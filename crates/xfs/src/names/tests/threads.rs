//! Threads that change names at once, in directories of their own and in the same ones.

use super::*;

/// Changes names below a few directories at random, together with other threads. Names may lead
/// anywhere by the time of a call, so any error of names is right. With `frees`, files without
/// names are freed at once, and no directory is entered that may be gone.
fn disturb(bench: &NameBench, dirs: &[Ino], seed: u64, steps: usize, frees: bool) -> Vec<Ino> {
    let (names, mut random, mut lost) = (bench.names(), Random::new(seed), Vec::new());
    let mut below = |end: u64| random.below(end);
    for step in 0..steps {
        let now = at(1_800_000_000 + i64::try_from(step).unwrap());
        let new = NewFile { at: now, ..new_file(0o700, 0) };
        let mut place = || {
            let mut dir = dirs[usize::try_from(below(dirs.len() as u64)).unwrap()];
            // Into a directory that the threads have made, at times.
            while !frees && below(2) == 0 {
                let name = format!("{}", below(6)).into_bytes();
                match names.look_up(NamePlace { dir, name: &name }) {
                    Ok(Some((ino, offshoot_xfs_format::dir::file_type::DIR))) => dir = ino,
                    _ => break,
                }
            }
            (dir, format!("{}", below(6)).into_bytes())
        };
        let (first, second) = (place(), place());
        let [from, to] = [&first, &second].map(|(dir, name)| NamePlace { dir: *dir, name });
        let done = match below(10) {
            0..2 => names.create(from, XfsNewKind::Directory, &new).map(|_| None),
            2 => names.create(from, XfsNewKind::Regular, &new).map(|_| None),
            3 => names.unlink(from, now),
            4 => names.rmdir(from, now).map(Some),
            5 => names.rename(from, to, Rename::Exchange, now),
            6 => match names.create_unnamed(from.dir, XfsNewKind::Regular, &new) {
                Ok(ino) => {
                    names.link_unnamed(ino, to, now).map(|()| None).inspect_err(|_| lost.push(ino))
                }
                Err(error) => Err(error),
            },
            7 if !frees => match names.look_up(from) {
                Ok(Some((ino, _))) => names.link(ino, to, now).map(|()| None),
                _ => Ok(None),
            },
            8 => {
                let how = Rename::Whiteout { new, replaces: true };
                names.rename(from, to, how, now)
            }
            _ => names.rename(from, to, Rename::Replace, now),
        };
        if frees {
            lost.drain(..).for_each(|ino| names.inactivate(ino).unwrap());
        }
        match done {
            Ok(Some(gone)) if frees => names.inactivate(gone).unwrap(),
            Ok(gone) => lost.extend(gone),
            Err(error) => {
                let is_of_names = matches!(
                    error.errno(),
                    Errno::EXIST
                        | Errno::NOENT
                        | Errno::NOTDIR
                        | Errno::ISDIR
                        | Errno::NOTEMPTY
                        | Errno::INVAL
                        | Errno::PERM
                );
                assert!(is_of_names, "{error}");
            }
        }
    }
    lost
}

fn threads(options: &str) {
    let seed = seed_of_run();
    let Some(bench) = NameBench::make(1 << 10, options) else { return };
    let make = |name: &str| {
        let place = NamePlace { dir: bench.root(), name: name.as_bytes() };
        bench.names().create(place, XfsNewKind::Directory, &new_file(0o755, 5)).unwrap()
    };
    let shared = ["first", "second", "third", "fourth"].map(make);
    let own = ["a", "b"].map(make);
    let whole = bench.tree();
    let mut churns: Vec<_> = (seed..)
        .zip(own)
        .map(|(seed, dir)| {
            let (tree, random) = (whole.below(dir), Random::new(seed));
            NameChurn { bench: &bench, tree, random, clock: 1_700_000_000, open: Vec::new() }
        })
        .collect();
    let lost = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for churn in &mut churns {
            scope.spawn(|| (0..500).for_each(|_| churn.step()));
        }
        for number in 0..4 {
            let (bench, lost, frees) = (&bench, &lost, number % 2 == 0);
            let dirs = if frees { &shared[..2] } else { &shared[2..] };
            scope.spawn(move || {
                let gone = disturb(bench, dirs, seed ^ number << 32, 700, frees);
                lost.lock().unwrap().extend(gone);
            });
        }
    });
    let mut lost = lost.into_inner().unwrap();
    let half = lost.split_off(lost.len() / 2);
    // What was lost is freed, while other threads go on.
    std::thread::scope(|scope| {
        for part in [&lost, &half] {
            scope.spawn(|| part.iter().for_each(|ino| bench.names().inactivate(*ino).unwrap()));
        }
        for churn in &mut churns {
            scope.spawn(|| {
                (0..200).for_each(|_| churn.step());
                churn.close(0);
            });
        }
    });
    let tree = bench.tree();
    for (churn, dir) in churns.iter().zip(own) {
        assert_eq!(tree.below(dir), churn.tree);
    }
    bench.assert_cut_recovers(&tree);
    drop(bench.assert_unmounts(&tree));
}

#[test]
fn threads_change_names_at_once() {
    threads("");
}

#[test]
fn threads_change_names_at_once_with_parent_pointers() {
    threads("-n parent=1 -b size=1024");
}

#[test]
fn threads_change_names_at_once_in_one_group() {
    threads("-d agcount=1 --unsupported");
}
