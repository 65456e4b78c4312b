//! `check`: its texts, its JSON and its exit codes.

use offshoot_testkit::xfs::judges;
use serde_json::Value;

use crate::FewFiles;

#[test]
fn findings_are_told_with_their_numbers() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let said = few.does("check v.img");
    assert!(said.ends_with(" inodes checked, nothing found\n"), "{said}");
    few.filled.disk.change_with_xfs_db(&["agi 0", "write -d newino 5", "write -d count 128"]);
    let said = few.fails("check v.img", 3);
    assert!(said.contains("627 InodeCounter: group 0: 128 inodes are counted, but"), "{said}");
    few.filled.disk.change_with_xfs_db(&["agf 1", "write -d seqno 7"]);
    let said = few.fails("check --ignore-log v.img", 3);
    assert!(said.contains("621 GroupHeader: group 1: "), "{said}");
}

#[test]
fn json_has_an_object_for_each_finding() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let parse = |line: &str| serde_json::from_str::<Value>(line).expect("it is JSON");
    let said = few.does("check --json v.img");
    let summary = parse(said.trim());
    assert_eq!((&summary["findings"], &summary["log"]), (&0.into(), &"empty".into()), "{said}");
    assert!(summary["inodes"].as_u64() > Some(3), "{said}");
}
