use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use offshoot_testkit::random::seed_of_run;
use offshoot_xfs_format::{AgBlock, AgNumber};

use super::work::{DeferredKind, FreedBlocks};
use super::{DeferredChain, DeferredWork, IntentIds, LoggedIntent, MOST_FREED, again_while_locked};
use crate::group::{self, ExtentWish, FreedFrom};
use crate::inode::change::tests::{UnnamedChurn, assert_closes_clean, volume};
use crate::log::LoggedItem;
use crate::trans::{XfsTransaction, XfsTransactionKind as Kind, XfsTransactions};

/// Allocates `count` extents, each of one block, which no tree has then. Returns the work that
/// frees them.
fn allocated(t: &mut XfsTransaction<'_>, count: u32) -> Vec<DeferredWork> {
    let one = |_| {
        let found = group::allocate(t, AgNumber(0), &ExtentWish::blocks(1)).unwrap().unwrap();
        let extent = (t.geometry().fs_block(AgNumber(0), found.start), found.count);
        DeferredWork::Free(FreedBlocks { extent, from: FreedFrom::Nobody })
    };
    (0..count).map(one).collect()
}

fn begin(engine: &XfsTransactions) -> offshoot_vfs::Result<XfsTransaction<'_>> {
    engine.begin_step(Kind::Truncate, 0)
}

/// The kernel logs intents to free 16 extents, and a transaction frees four.
#[test]
fn an_old_intent_to_free_many_extents_takes_several_transactions() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    let mut t = engine.begin(Kind::Write, 64).unwrap();
    let work = allocated(&mut t, 16);
    t.commit().unwrap();
    let ids = IntentIds::default();
    let mut chain = DeferredChain::new(&ids);
    let mut t = begin(&engine).unwrap();
    let intent = Arc::new(LoggedIntent::new(ids.next(), DeferredKind::Free, &work));
    chain.end(&mut t, intent, &work).unwrap();
    t.commit().unwrap();
    let left: Vec<_> =
        chain.waiting[&DeferredKind::Free].iter().map(|one| one.work.len()).collect();
    assert_eq!(left, [MOST_FREED; 3]);
    chain.finish_alone(&engine, begin).unwrap();
    assert_closes_clean(&disk, engine, &[]);
}

/// The intents of work that cannot be done are in the log, where a recovery finds them.
#[test]
fn a_chain_that_fails_ends_all_writing() {
    let Some((_disk, engine)) = volume(1 << 10, "") else { return };
    let ids = IntentIds::default();
    let mut t = engine.begin(Kind::Write, 64).unwrap();
    let found = group::allocate(&mut t, AgNumber(0), &ExtentWish::blocks(1)).unwrap().unwrap();
    let blocks = (t.geometry().fs_block(AgNumber(0), found.start), 1);
    let mut chain = DeferredChain::new(&ids);
    // They were never staged.
    chain.defer(&mut t, DeferredWork::unstaged(engine.geometry(), blocks, true));
    let failed = chain.finish(t, &[]).unwrap_err();
    let later = begin(&engine).unwrap_err();
    assert!(later.to_string().contains(&failed.to_string()), "{failed}, and then {later}");
}

#[test]
fn intents_that_wait_long_are_logged_again() {
    let Some((disk, engine)) = volume(1 << 10, "--unsupported -l size=14m") else { return };
    let ids = IntentIds::default();
    let mut chain = DeferredChain::new(&ids);
    let mut t = engine.begin(Kind::Write, 64).unwrap();
    let work = allocated(&mut t, 10);
    chain.defer(&mut t, work);
    t.commit().unwrap();
    engine.log().force_all().unwrap();
    let are_old = |chain: &DeferredChain<'_>| {
        let mut waiting = chain.waiting.values().flatten();
        let is_old = |lsn| engine.log().is_near_tail(lsn);
        waiting.any(|waiting| waiting.intent.state().active_lsn().is_none_or(is_old))
    };
    let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..2);
    while !are_old(&chain) {
        (0..50).for_each(|_| churn.step());
        engine.log().force_all().unwrap();
    }
    let mut t = begin(&engine).unwrap();
    chain.log_again(&mut t);
    t.commit().unwrap();
    engine.log().force_all().unwrap();
    assert!(!are_old(&chain));
    // The tail is not held any more: the log takes as much again as it has.
    let before = engine.log().statistics().bytes;
    while engine.log().statistics().bytes < before + (14 << 20) {
        (0..50).for_each(|_| churn.step());
        let mut t = begin(&engine).unwrap();
        chain.log_again(&mut t);
        t.commit().unwrap();
        engine.log().force_all().unwrap();
    }
    chain.finish_alone(&engine, begin).unwrap();
    while !churn.files.is_empty() {
        churn.free(0);
    }
    assert_closes_clean(&disk, engine, &[]);
}

/// Only group 0 has so many blocks in a row, and another transaction has it for a while. The step
/// has a block of group 1, so it must not wait.
#[test]
fn a_step_that_meets_a_locked_group_begins_again() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    let mut t = engine.begin(Kind::Write, 64).unwrap();
    let middle = ExtentWish { near: Some(AgBlock(30_000)), ..ExtentWish::blocks(1) };
    let mut take = |ag| (ag, group::allocate(&mut t, ag, &middle).unwrap().unwrap());
    let mut taken = [1, 3].map(AgNumber).map(&mut take).to_vec();
    t.commit().unwrap();
    let is_held = Barrier::new(2);
    let mut tries = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut t = engine.begin(Kind::Write, 64).unwrap();
            group::allocate(&mut t, AgNumber(0), &ExtentWish::blocks(1)).unwrap().unwrap();
            is_held.wait();
            thread::sleep(Duration::from_millis(100));
        });
        is_held.wait();
        let mut t = engine.begin(Kind::Write, 64).unwrap();
        let both = again_while_locked(&mut t, &[], |t| {
            tries += 1;
            let one = group::allocate(t, AgNumber(1), &ExtentWish::blocks(1))?.unwrap();
            let near = Some((AgNumber(1), one.start));
            let many = group::allocate_anywhere(t, near, &ExtentWish::blocks(55_000))?.unwrap();
            assert_eq!(many.0, AgNumber(0));
            Ok([(AgNumber(1), one), many])
        });
        taken.extend(both.unwrap());
        t.commit().unwrap();
    });
    assert!(tries > 1);
    let mut t = begin(&engine).unwrap();
    for (ag, extent) in taken {
        group::free_extent(&mut t, ag, extent, FreedFrom::Nobody).unwrap();
    }
    t.commit().unwrap();
    assert_closes_clean(&disk, engine, &[]);
}

/// As long as another transaction has the group, and not for a number of tries: what the chain did
/// before is committed, and an error would end all writing.
#[test]
fn a_step_waits_for_a_locked_group_however_long() {
    let Some((_disk, engine)) = volume(1 << 10, "") else { return };
    let engine = &engine;
    let hold = |t: &mut XfsTransaction<'_>, ag| group::first_unlinked(t, AgNumber(ag), 0);
    let is_held = Barrier::new(3);
    thread::scope(|scope| {
        for (ag, millis) in [(0, 4000), (1, 300)] {
            let is_held = &is_held;
            scope.spawn(move || {
                let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
                hold(&mut t, ag).unwrap();
                is_held.wait();
                thread::sleep(Duration::from_millis(millis));
            });
        }
        is_held.wait();
        let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
        let mut tries = 0;
        again_while_locked(&mut t, &[], |t| {
            tries += 1;
            [2, 1, 0].into_iter().try_for_each(|ag| hold(t, ag).map(drop))
        })
        .unwrap();
        assert_eq!(tries, 3, "each time one more group");
    });
}

/// What a step has taken is not free any more, and leaves the promise: it counts once.
#[test]
fn what_a_chain_has_taken_is_promised_no_longer() {
    let Some((_disk, engine)) = volume(1 << 10, "-m rmapbt=0") else { return };
    let free = engine.counters().free_for_files();
    let mut t = engine.begin(Kind::Write, 40_000).unwrap();
    let most = |blocks| engine.begin(Kind::Write, blocks).map(drop);
    most(free - 40_000).unwrap();
    most(free - 39_999).unwrap_err();
    group::allocate(&mut t, AgNumber(0), &ExtentWish::blocks(30_000)).unwrap().unwrap();
    t.roll(&[]).unwrap();
    most(free - 40_000).unwrap();
    most(free - 39_999).unwrap_err();
    drop(t);
    most(free - 30_000).unwrap();
}
