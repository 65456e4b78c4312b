//! The bounds of memory: more passes find the same.

use std::path::Path;

use offshoot_testkit::fill::{directory, names, shapes, write};
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;

use super::*;

fn fill(root: &Path) {
    names::hard_links(&directory(root, "links"));
    shapes::clones(&directory(root, "clones"));
    for dir in 0..8 {
        let dir = directory(root, &format!("{dir}"));
        (0..100).for_each(|file| write(&dir.join(format!("{file}")), &[b'f'; 9000]));
    }
}

#[test]
fn small_budgets_find_the_same_in_more_passes() {
    let Some(judges) = judges::require() else { return };
    let filled = XfsRecipe::new(XfsVolumeKind::named("today")).fill(fill).make(&judges);
    let budgets = [(usize::MAX, usize::MAX, 1..2), (0, usize::MAX, 4..5), (usize::MAX, 0, 4..5)]
        .into_iter()
        .chain([(10_000, 400, 2..5)]);
    let check = |inodes, runs| {
        check_within(&filled.disk.device(), &XfsOptions::default(), PassBudget { inodes, runs })
            .unwrap()
    };
    for (inodes, runs, passes) in budgets.clone() {
        let result = check(inodes, runs);
        assert!(result.findings.is_empty(), "{:#?}", result.findings);
        assert!(passes.contains(&result.passes), "{inodes}, {runs}: {} passes", result.passes);
    }
    let links = filled.disk.field(&["sb 0"], "rootino") + 3;
    let go = format!("inode {links}");
    filled.disk.change_with_xfs_db(&[&go, "write -d core.nlinkv2 77"]);
    let expected = check(usize::MAX, usize::MAX).findings;
    assert!(!expected.is_empty());
    for (inodes, runs, _) in budgets {
        assert_eq!(check(inodes, runs).findings, expected, "{inodes}, {runs}");
    }
}
